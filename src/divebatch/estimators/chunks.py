"""Gradients of several chunks of samples, as the two sums that an unbiased estimate needs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.errors import CheckpointError, UsageError
from divebatch.estimators.average import unbiased
from divebatch.estimators.estimator import Scene, optimizer_of
from divebatch.estimators.precondition import Preconditioner, require_second_moment
from divebatch.estimators.stepwise import Stepwise
from divebatch.norms.sketch import sum_dtype
from divebatch.norms.sums import addend


class Chunks:
    """Adds up chunk gradients; costs one copy of the trainable parameters.

    With an `optimizer` gradients are first divided by the root of its second moment, as it stood at the first of the
    chunks that belong together; that costs a second copy.
    """

    def __init__(self, model: nn.Module, *, optimizer: Optimizer | None = None) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._preconditioner = Preconditioner(optimizer, self.parameters) if optimizer is not None else None
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in self.parameters.items()}
        self.forget()

    def forget(self) -> None:
        """Back to no chunk."""
        self._sizes: list[int] = []
        self._sq_norms: list[Tensor] = []
        self._before_last: Tensor | None = None
        """Squared norm of the sum that the last chunk was added to."""
        self._scales: dict[str, Tensor] | None = None
        torch._foreach_zero_(list(self._sums.values()))

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`.

        Before an optimizer's first step there is nothing to divide by, and the chunk is left out.
        """
        if self._preconditioner is not None:
            self._scales = self._scales or self._preconditioner.scales()
            if self._scales is None:
                return
            gradients = _rescaled(gradients, self._scales)
        sums = [self._sums[name] for name in gradients]
        plain = [addend(gradient, total) for gradient, total in zip(gradients.values(), sums, strict=True)]
        self._before_last = self._sq_norm_of_sum() if self._sizes else None
        self._sizes.append(num_samples)
        self._sq_norms.append(scale**2 * sq_norm(plain))
        torch._foreach_add_(sums, plain, alpha=num_samples * scale)

    @property
    def num_chunks(self) -> int:
        """So far."""
        return len(self._sizes)

    @property
    def num_samples(self) -> int:
        """In all chunks so far."""
        return sum(self._sizes)

    def pair(self) -> Tensor:
        """(tr(Sigma), ||G||^2) and Var_i<g_i, g>, from at least two chunks."""
        mean = self._sq_norm_of_sum() / self.num_samples**2
        parts = [size * each.to(mean.device) for size, each in zip(self._sizes, self._sq_norms, strict=True)]
        pair = unbiased(torch.stack(parts).sum(), mean, self.num_chunks, self.num_samples)
        return torch.cat([pair, self._inner_variance(mean)[None]])

    def _inner_variance(self, mean: Tensor) -> Tensor:
        """From two chunks: the last, and all before it as one. Inner products of more would need their gradients."""
        assert self._before_last is not None
        last, rest = self._sizes[-1], self.num_samples - self._sizes[-1]
        sq_norms = self._before_last.to(mean.device) / rest**2, self._sq_norms[-1].to(mean.device)
        return inner_variance(sq_norms, (rest, last), mean)

    def _sq_norm_of_sum(self) -> Tensor:
        if self.num_chunks == 1:  # known already: two chunks cost no more norms than they must
            return self._sizes[0] ** 2 * self._sq_norms[0]
        return sq_norm(list(self._sums.values()))

    def state_dict(self) -> dict[str, Any]:
        """The sums of chunks that wait for more."""
        return {
            "sizes": list(self._sizes),
            "sq_norms": [float(each) for each in self._sq_norms],
            "before_last": None if self._before_last is None else float(self._before_last),
            "sums": {name: total.clone() for name, total in self._sums.items()} if self.num_chunks else {},
            "scales": {name: scale.clone() for name, scale in self._scales.items()} if self._scales else None,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if the sums are another model's."""
        for name, total in state["sums"].items():
            here = self._sums.get(name)
            if here is None or here.shape != total.shape:
                shape = None if here is None else tuple(here.shape)
                raise CheckpointError(
                    f"the checkpoint's gradient sums are another model's: parameter '{name}' has shape "
                    f"{tuple(total.shape)} there and {shape} here"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        self.check_state(state)
        self.forget()
        self._sizes = list(state["sizes"])
        self._sq_norms = [torch.tensor(each, dtype=torch.float64) for each in state["sq_norms"]]
        before_last = state.get("before_last", math.nan)  # not in states of before
        self._before_last = None if before_last is None else torch.tensor(before_last, dtype=torch.float64)
        for name, total in state["sums"].items():
            self._sums[name].copy_(total)
        self._scales = state.get("scales")


class ChunkWise(Stepwise):
    """An estimate from chunks; one may be half-way through them when a state is taken."""

    def __init__(self, *, decay: float = 1.0, preconditioned: bool = False) -> None:
        super().__init__(decay=decay)
        self._preconditioned = preconditioned
        self._chunks: Any = None
        self._stepped = 0
        """Samples the loader had delivered at the last optimizer step."""

    def _require_optimizer(self, scene: Scene, name: str) -> None:
        optimizer = optimizer_of(scene, name)
        if self._preconditioned:
            require_second_moment(optimizer)

    def _new_chunks(self, scene: Scene) -> Any:
        return Chunks(scene.model, optimizer=scene.optimizer if self._preconditioned else None)

    def _samples_delivered(self) -> int:
        return self._bound().samples_delivered() if self.sees_all_ranks else self._bound().delivered_here()

    def _own_state(self) -> dict[str, Any]:
        assert self._chunks is not None
        waiting = self._samples_delivered() - self._stepped
        if self._chunks.num_chunks and not (self.sees_all_ranks or self._bound().ranks.is_alone):
            raise UsageError("ranks that share a batch save their state after an optimizer step, not within one")
        return {"chunks": self._chunks.state_dict(), "since_step": waiting}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        Chunks(self._bound().model).check_state(state["chunks"])

    def _load_own_state(self, state: dict[str, Any]) -> None:
        assert self._chunks is not None
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]


def inner_variance(sq_norms: tuple[Tensor, Tensor], sizes: tuple[int, int], sq_norm_of_mean: Tensor) -> Tensor:
    """Var_i<g_i, g> over samples, from the squared norms of two chunks' mean gradients and of their common mean g.

    <g_1 - g_2, g> has the variance of one sample times 1/s_1 + 1/s_2, and mean zero. It follows from norms alone.
    """
    (first, second), (size, other) = sq_norms, sizes
    between = ((size + other) ** 2 * sq_norm_of_mean - size**2 * first - other**2 * second) / (2 * size * other)
    inner = (size * first - other * second + (other - size) * between) / (size + other)
    return inner.square() * size * other / (size + other)


def sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them as one vector, in float64; 0 of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()


def _rescaled(gradients: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Coordinate by coordinate. A parameter that the optimizer has not moved yet has no scale and is left out."""
    return {name: addend(g, scales[name]) * scales[name] for name, g in gradients.items() if name in scales}
