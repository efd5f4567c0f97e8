"""Sizes in multiples of a backward pass, and a learning rate that belongs to them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from divebatch import Diversity, Measurement, Policy
from divebatch.integrations.accumulation import InMultiples
from divebatch.measurement import History
from divebatch.policies import NoiseDoubling, NoiseScale, SpillOver, WarmUp

POLICIES: dict[str, Callable[[int], Policy]] = {
    "auto": NoiseDoubling,
    "warm-up": lambda cap: WarmUp(NoiseScale(cap)),
    "spill-over": lambda cap: SpillOver(NoiseScale(cap)),
}


def decided(policy: Policy, first: int, epochs: int = 6) -> list[tuple[int, float]]:
    """Batch size and learning rate after each epoch, coupled linearly, from the first batch and a rate of 1."""
    size, lr, history, found = first, 1.0, History(), []
    diversity = Diversity.from_noise(500.0, 1.0, 10_000)
    for epoch in range(1, epochs + 1):
        seen = Measurement(
            epoch=epoch,
            batch_size=size,
            first_batch_size=first,
            dataset_size=10_000,
            diversity=diversity,
            lr_coupling="linear",
            history=history,
        )
        seen = replace(seen, history=history.with_epoch(seen))
        decision = policy.next(seen)
        history = seen.history.with_decision(size, decision)
        size, lr = decision.batch_size, lr * decision.lr_factor * decision.batch_size / size
        found.append((size, lr))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cap_that_is_no_multiple_is_as_the_multiple_below(policy: str):
    ours = decided(InMultiples(POLICIES[policy](30), 8), 8)
    assert ours == [(size, pytest.approx(lr)) for size, lr in decided(InMultiples(POLICIES[policy](24), 8), 8)]
    assert ours[-1][0] == 24
