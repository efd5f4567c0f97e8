"""Policies for frameworks that make an optimizer step from several backward passes."""

from dataclasses import dataclass, replace

from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from divebatch.policies.wrappers import Around


def refuse_loss(policy: Policy) -> None:
    """Raise for a policy that needs the epoch's loss, which adapters do not know when they call `Controller.step`."""
    if "loss" in policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} needs the epoch's mean training loss, which this adapter does not pass on: "
            f"use another policy, or a loop of your own with control.step(loss=...)"
        )


def in_multiples(policy: Policy, seen: Measurement, unit: int) -> Decision:
    """Return what `policy` decides, with the size rounded down to a multiple of `unit` samples, but not to nothing."""
    decision = policy.next(seen)
    size = max(1, decision.batch_size // unit) * unit
    if policy.moves_lr and size < decision.batch_size:  # asked again, for a learning rate that belongs to this size
        decision = replace(policy.next(replace(seen, largest_batch_size=size)), reason=decision.reason)
    return replace(decision, batch_size=size)


@dataclass(frozen=True)
class OverPasses(Around):
    """`policy` for a loader whose batches are only a part of the optimizer's: `num_passes` of them make one step.

    The policy sees and chooses whole batches; the loader gets whole ones over `num_passes`, rounded down.
    """

    num_passes: int

    def next(self, seen: Measurement) -> Decision:
        previous = seen.history.previous_batch_size
        history = replace(
            seen.history,
            previous_batch_size=None if previous is None else previous * self.num_passes,
            throughputs=tuple((size * self.num_passes, speed) for size, speed in seen.history.throughputs),
        )
        whole = replace(
            seen,
            batch_size=seen.batch_size * self.num_passes,
            first_batch_size=seen.first_batch_size * self.num_passes,
            history=history,
        )
        decision = in_multiples(self.policy, whole, self.num_passes)
        return replace(decision, batch_size=decision.batch_size // self.num_passes)

    def measures(self, epoch: int, batch_size: int) -> bool:
        return self.policy.measures(epoch, batch_size * self.num_passes)

    def check_start(self, batch_size: int) -> None:
        self.policy.check_start(batch_size * self.num_passes)


@dataclass(frozen=True)
class InMultiples(Around):
    """`policy`, with every size it chooses rounded down to a multiple of `unit`, the samples of one backward pass."""

    unit: int

    def next(self, seen: Measurement) -> Decision:
        return in_multiples(self.policy, seen, self.unit)
