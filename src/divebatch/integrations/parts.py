"""A batch in parts: dealt out to processes, or summed over several backward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from divebatch.data.loader import AdaptiveLoader
from divebatch.data.source import Source
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from divebatch.policies.wrappers import Around


def share_between_processes(loader: AdaptiveLoader, policy: Policy, *, rank: int, num_processes: int) -> None:
    """Let `loader` deliver only this process's part of each batch; its sizes and counts stay those of all processes.

    Nothing is padded or repeated, so what does not divide is refused.
    """
    if num_processes == 1:
        return
    if policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} reads {', '.join(sorted(policy.needs))}, and sums over {num_processes} processes "
            f"are not built yet: use one process, or a policy that does not measure (AdaBatch, Fixed)"
        )
    if loader.dataset_size is None or loader.dataset_size % num_processes:
        raise ArgumentError(
            f"an epoch of {loader.dataset_size} samples cannot be dealt out to {num_processes} processes without "
            f"padding or loss: use a Subset whose length {num_processes} divides"
        )
    if not isinstance(loader._source, _ShareOfSource):
        loader._source = _ShareOfSource(loader._source, rank, num_processes)


def refuse_loss(policy: Policy) -> None:
    """For adapters that call `Controller.step` themselves and do not know the epoch's loss."""
    if "loss" in policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} needs the epoch's mean training loss, which this adapter does not pass on: "
            f"use another policy, or a loop of your own with control.step(loss=...)"
        )


@dataclass(frozen=True)
class _ShareOfSource:
    """One process's samples: every `num_processes`-th of the epoch's order, so all processes together hold a batch."""

    source: Source
    rank: int
    num_processes: int

    def batches(
        self, order: Tensor | Sequence[Any] | None, batch_size: int, *, start: int, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """Local batches, each with the number of samples of the whole one."""
        assert order is not None
        if batch_size % self.num_processes:
            raise ArgumentError(
                f"batch_size={batch_size} cannot be shared by {self.num_processes} processes: "
                f"let the policy choose multiples of {self.num_processes} only"
            )
        mine = order[self.rank :: self.num_processes]
        local_size = batch_size // self.num_processes
        for num_samples, batch in self.source.batches(mine, local_size, start=start, seed=seed):
            yield num_samples * self.num_processes, batch


@dataclass(frozen=True)
class OverPasses(Around):
    """`policy` for a loader whose batches are only a part of the optimizer's: `num_passes` of them make one step.

    The policy sees and chooses whole batches; the loader gets whole ones over `num_passes`, rounded down.
    """

    num_passes: int

    def next(self, seen: Measurement) -> Decision:
        """The loader's next batch size."""
        history = replace(
            seen.history,
            previous_batch_size=self._whole(seen.history.previous_batch_size),
            throughputs=tuple((size * self.num_passes, speed) for size, speed in seen.history.throughputs),
        )
        whole = replace(
            seen,
            batch_size=seen.batch_size * self.num_passes,
            first_batch_size=self._whole(seen.first_batch_size),
            history=history,
        )
        decision = self.policy.next(whole)
        return replace(decision, batch_size=max(1, decision.batch_size // self.num_passes))

    def _whole(self, size: int | None) -> int | None:
        return None if size is None else size * self.num_passes

    def measures(self, epoch: int, batch_size: int) -> bool:
        """As the policy says of the whole batch."""
        return self.policy.measures(epoch, batch_size * self.num_passes)

    def check_start(self, batch_size: int) -> None:
        """As the policy says of the whole batch."""
        self.policy.check_start(batch_size * self.num_passes)


@dataclass(frozen=True)
class InMultiples(Around):
    """`policy`, with every size it chooses rounded down to a multiple of `unit`, the samples of one backward pass."""

    unit: int

    def next(self, seen: Measurement) -> Decision:
        """The policy's choice, rounded."""
        decision = self.policy.next(seen)
        return replace(decision, batch_size=max(1, decision.batch_size // self.unit) * self.unit)
