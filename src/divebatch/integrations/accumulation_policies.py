"""Policies for frameworks that make an optimizer step from several backward passes."""

from dataclasses import dataclass

from divebatch.controller import in_multiples
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from divebatch.policies.policy import require_policy
from divebatch.policies.wrappers import Around


def refuse_loss(policy: Policy) -> None:
    """Raise for what is no policy, and for one that needs the epoch's loss, which adapters do not pass on."""
    require_policy(policy)
    if "loss" in policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} needs the epoch's mean training loss, which this adapter does not pass on: "
            f"use another policy, or a loop of your own with control.step(loss=...)"
        )


@dataclass(frozen=True)
class InMultiples(Around):
    """`policy`, with every size it chooses rounded down to a multiple of `unit`, the samples of one backward pass."""

    unit: int

    def next(self, seen: Measurement) -> Decision:
        return in_multiples(self.policy, seen, self.unit)
