"""Gradients of several chunks of samples, as the two sums that an unbiased estimate needs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.deferred_norms import Norms, Readable, Row, norms_of, numbers_of, read
from divebatch.estimators.estimator import Scene, optimizer_of
from divebatch.estimators.precondition import Preconditioner, require_second_moment, rescaled
from divebatch.estimators.stepwise import Stepwise
from divebatch.norms.accumulators import addend
from divebatch.norms.sketch import sum_dtype

MOST_WAITING = 512
"""Rows whose norms may lie on the device unread."""


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
        self._factors: list[float] = []
        self._norms: list[Norms] = []
        self._before_last: Norms | None = None
        """Of the sum that the last chunk was added to, where there was more in it than the first."""
        self._scales: dict[str, Tensor] | None = None
        torch._foreach_zero_(list(self._sums.values()))

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`.

        Before an optimizer's first step there is nothing to divide by, and the chunk is left out. So is one of no
        samples, which is what a loader counts that was left within an epoch and begins anew.
        """
        if num_samples == 0:
            return
        if self._preconditioner is not None:
            self._scales = self._scales or self._preconditioner.scales()
            if self._scales is None:
                return
            gradients = rescaled(gradients, self._scales)
        sums = [self._sums[name] for name in gradients]
        plain = [addend(gradient, total) for gradient, total in zip(gradients.values(), sums, strict=True)]
        self._before_last = self._norms_of_sum() if self.num_chunks > 1 else None  # two cost no more than they must
        self._sizes.append(num_samples)
        self._factors.append(scale**2)
        self._norms.append(norms_of(plain))
        torch._foreach_add_(sums, plain, alpha=num_samples * scale)

    @property
    def num_chunks(self) -> int:
        """So far."""
        return len(self._sizes)

    @property
    def num_samples(self) -> int:
        """In all chunks so far."""
        return sum(self._sizes)

    def row(self) -> Row:
        """What two chunks or more showed."""
        return Row(self._sizes, self._factors, self._norms, self._norms_of_sum(), self._before_last)

    def _norms_of_sum(self) -> Norms:
        return norms_of(list(self._sums.values()))

    def state_dict(self) -> dict[str, Any]:
        """The sums of chunks that wait for more."""
        return {
            "sizes": list(self._sizes),
            "sq_norms": [factor * each for factor, each in zip(self._factors, read(self._norms), strict=True)],
            "before_last": None if self._before_last is None else read([self._before_last])[0],
            "sums": {name: total.clone() for name, total in self._sums.items()} if self.num_chunks else {},
            "scales": {name: scale.clone() for name, scale in self._scales.items()} if self._scales else None,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if the sums are another model's."""
        check_shapes("gradient sums", state["sums"], self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        self.check_state(state)
        self.forget()
        self._sizes, self._norms = list(state["sizes"]), list(state["sq_norms"])
        self._factors, self._before_last = [1.0] * len(self._norms), state.get("before_last", math.nan)
        for name, total in state["sums"].items():
            self._sums[name].copy_(total)
        self._scales = state.get("scales")


class ChunkWise(Stepwise):
    """An estimate from chunks; one may be half-way through them when a state is taken."""

    def __init__(self, *, decay: float = 1.0, preconditioned: bool = False, every: int = 1) -> None:
        super().__init__(decay=decay)
        if not isinstance(preconditioned, bool):
            raise ArgumentError(f"preconditioned must be True or False, got preconditioned={preconditioned!r}")
        require_count("every", every)
        self._preconditioned, self._every = preconditioned, every
        self._chunks: Any = None
        self._waiting: list[Readable] = []
        """To be read and averaged."""
        self._stepped = 0
        """Samples the loader had delivered at the last optimizer step."""

    @property
    def min_steps_between_decisions(self) -> int:
        """From decision to decision, so that each sees two estimates; an exponential mean goes on through them."""
        return 2 * self._every if self._every > 1 and self._decay == 1 else 1

    def _require_optimizer(self, scene: Scene, name: str) -> None:
        optimizer = optimizer_of(scene, name)
        if self._preconditioned:
            require_second_moment(optimizer)

    def _new_chunks(self, scene: Scene) -> Any:
        return Chunks(scene.model, optimizer=scene.optimizer if self._preconditioned else None)

    def _add_row(self, row: Readable) -> None:
        self._waiting.append(row)
        if len(self._waiting) >= MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        rows, self._waiting = self._waiting, []
        self._average.extend(numbers_of(rows), [row.num_samples for row in rows])

    def _of_all_ranks(self) -> PairAverage:
        self._settle()
        return super()._of_all_ranks()

    def _forget(self) -> None:
        super()._forget()
        self._waiting = []

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
        self._waiting = []
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]


def sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them as one vector, in float64; 0 of none."""
    norms = norms_of(tensors)
    return norms.double().square().sum() if isinstance(norms, Tensor) else torch.zeros((), dtype=torch.float64)


def check_shapes(what: str, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise where a checkpoint's tensors are not those of the parameters here."""
    for name, tensor in there.items():
        if name not in here or here[name].shape != tensor.shape:
            shape = tuple(here[name].shape) if name in here else None
            raise CheckpointError(
                f"the checkpoint's {what} are another model's: parameter '{name}' has shape {tuple(tensor.shape)} "
                f"there and {shape} here"
            )
