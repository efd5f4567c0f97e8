"""Gradients of several chunks of samples, as the sums that an unbiased estimate needs; also as Adam sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.estimators.average import Norms, Readable, Row, norms_of, read
from divebatch.estimators.second_moment import Preconditioner, rescaled
from divebatch.norms.accumulators import addend
from divebatch.norms.sharded import Shards
from divebatch.norms.sketch import sum_dtype


class Chunks:
    """Adds up chunk gradients; costs one copy of the trainable parameters, or of this rank's shards of them.

    With an `optimizer` gradients are first divided by the root of its second moment, as it stood at the first of the
    chunks that belong together; that costs a second copy.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, optimizer: Optimizer | None = None) -> None:
        self.parameters = parameters
        self._preconditioner = Preconditioner(optimizer, self.parameters) if optimizer is not None else None
        self.shards = Shards(parameters)
        held = self.shards.held
        self._sums = {name: torch.zeros_like(each, dtype=sum_dtype(each.dtype)) for name, each in held.items()}
        self.forget()

    def forget(self) -> None:
        """Drop all chunks."""
        self._sizes: list[int] = []
        self._factors: list[float] = []
        self._norms: list[Norms] = []
        self._before_last: Norms | None = None
        """Norms of the sum that the last chunk was added to, where that held more than the first chunk."""
        self._scales: dict[str, Tensor] | None = None
        torch._foreach_zero_(list(self._sums.values()))

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`.

        Before an optimizer's first step there is nothing to divide by, and the chunk is left out. So is one of no
        samples, which is what a loader counts that was left within an epoch and starts again.
        """
        if num_samples == 0:
            return
        if self._preconditioner is not None:
            # Those of the first chunk for all that are compared: another divisor would look like noise.
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
        """Chunks so far."""
        return len(self._sizes)

    @property
    def num_samples(self) -> int:
        """Samples in all chunks so far."""
        return sum(self._sizes)

    def row(self) -> Readable:
        """The row of two or more chunks."""
        return self._row()

    def _row(self) -> Row:
        return Row(self._sizes, self._factors, self._norms, self._norms_of_sum(), self._before_last)

    def _norms_of_sum(self) -> Norms:
        return norms_of(list(self._sums.values()))

    def state_dict(self) -> dict[str, Any]:
        """The sums of chunks that wait for more."""
        numbers = [factor * each for factor, each in zip(self._factors, read(self._norms), strict=True)]
        if self._before_last is not None:
            numbers += read([self._before_last])
        numbers, chunks = self.shards.summed(numbers), self.num_chunks
        return {
            "sizes": list(self._sizes),
            "sq_norms": numbers[:chunks],
            "before_last": None if self._before_last is None else numbers[chunks],
            "sums": self.shards.save(self._sums) if chunks else {},
            "scales": self.shards.save(self._scales) if self._scales else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        self.forget()
        self._sizes, self._norms = list(state["sizes"]), [*self.shards.share(state["sq_norms"])]
        # The saved squares have their factors in them already.
        self._factors, before = [1.0] * len(self._norms), state["before_last"]
        self._before_last = None if before is None else self.shards.share([before])[0]
        for name, total in self.shards.load(state["sums"]).items():
            self._sums[name].copy_(total)
        self._scales = None if state["scales"] is None else self.shards.load(state["scales"])


def sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of all tensors as one vector, in float64; 0 where there are none."""
    norms = norms_of(tensors)
    return norms.double().square().sum() if isinstance(norms, Tensor) else torch.zeros((), dtype=torch.float64)
