"""Gradients of several chunks of samples, as the two sums that an unbiased estimate needs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.errors import CheckpointError
from divebatch.estimators.average import unbiased
from divebatch.estimators.stepwise import Stepwise
from divebatch.norms.sketch import sum_dtype
from divebatch.norms.sums import addend


class Chunks:
    """Adds up chunk gradients; costs one copy of the trainable parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in self.parameters.items()}
        self.forget()

    def forget(self) -> None:
        """Back to no chunk."""
        self._sizes: list[int] = []
        self._sq_norms: list[Tensor] = []
        torch._foreach_zero_(list(self._sums.values()))

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`."""
        sums = [self._sums[name] for name in gradients]
        plain = [addend(gradient, total) for gradient, total in zip(gradients.values(), sums, strict=True)]
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
        """(tr(Sigma), ||G||^2) of at least two chunks, and Var_i<g_i, g> if they are two; else NaN."""
        mean = sq_norm(list(self._sums.values())) / self.num_samples**2
        sq_norms = torch.stack([each.to(mean.device) for each in self._sq_norms])
        sizes = torch.tensor(self._sizes, dtype=torch.float64, device=mean.device)
        pair = unbiased((sizes * sq_norms).sum(), mean, self.num_chunks, self.num_samples)
        inner = inner_variance(sq_norms, sizes, mean) if self.num_chunks == 2 else torch.full_like(mean, torch.nan)
        return torch.cat([pair, inner[None]])

    def state_dict(self) -> dict[str, Any]:
        """The sums of chunks that wait for more."""
        return {
            "sizes": list(self._sizes),
            "sq_norms": [float(each) for each in self._sq_norms],
            "sums": {name: total.clone() for name, total in self._sums.items()} if self.num_chunks else {},
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
        for name, total in state["sums"].items():
            self._sums[name].copy_(total)


class ChunkWise(Stepwise):
    """An estimate from chunks; one may be half-way through them when a state is taken."""

    def __init__(self, *, decay: float = 1.0) -> None:
        super().__init__(decay=decay)
        self._chunks: Chunks | None = None
        self._stepped = 0
        """Samples the loader had delivered at the last optimizer step."""

    def _own_state(self) -> dict[str, Any]:
        assert self._chunks is not None
        waiting = self._bound().samples_delivered() - self._stepped
        return {"chunks": self._chunks.state_dict(), "since_step": waiting}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        Chunks(self._bound().model).check_state(state["chunks"])

    def _load_own_state(self, state: dict[str, Any]) -> None:
        assert self._chunks is not None
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]


def inner_variance(sq_norms: Tensor, sizes: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
    """Var_i<g_i, g> over samples, from the squared norms of two chunks' mean gradients and of their common mean g.

    <g_1 - g_2, g> has the variance of one sample times 1/s_1 + 1/s_2, and mean zero. It follows from norms alone.
    """
    weighted = (sizes**2 * sq_norms).sum()
    between = (sizes.sum() ** 2 * sq_norm_of_mean - weighted) / (2 * sizes.prod())  # <g_1, g_2>
    inner = (sizes[0] * sq_norms[0] - sizes[1] * sq_norms[1] + (sizes[1] - sizes[0]) * between) / sizes.sum()
    return inner.square() / (1 / sizes).sum()


def sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them as one vector, in float64; 0 of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()
