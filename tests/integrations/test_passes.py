"""How steps fall into passes, whatever the sizes: every sample once, weights that add up, and a budget in samples."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from divebatch import AdaptiveLoader, Diversity, Measurement, Policy
from divebatch.integrations.accumulation import InMultiples, StepBudget, StepPasses, deliver_in_passes
from divebatch.measurement import History
from divebatch.policies import NoiseDoubling, NoiseScale, SpillOver, WarmUp


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(100.0))


class Loop:
    """A loop that steps after as many passes as it is told, and notes each step as the weights of its passes."""

    def __init__(self, loader: AdaptiveLoader, passes: int = 1, budget: int | None = None) -> None:
        deliver_in_passes(loader, passes, "passes")
        self.loader, self.first = loader, loader.batch_size
        self.steps: list[list[float]] = []
        self.samples: list[int] = []
        self.told = 0
        left = None if budget is None else StepBudget(budget, lambda: self.first, loader).samples_left
        settings: dict[str, Any] = {} if left is None else {"samples_left": left}
        control: Any = SimpleNamespace(loader=loader, then=None)
        loader.observe(lambda current: control.then(current))
        self.passes = StepPasses(control, self._begin, loss_reduction="mean", **settings)
        self.left = left

    def _begin(self, count: int) -> None:
        assert not self.steps or len(self.steps[-1]) == self.told  # the step before had what was said
        self.told = count
        self.steps.append([])
        self.samples.append(0)

    def epoch(self, sizes: list[int]) -> None:
        for batch in self.loader:
            loss = torch.ones((), requires_grad=True)
            scaled = loss / self.told
            self.passes.weigh(scaled)
            scaled.backward()
            assert loss.grad is not None
            self.steps[-1].append(float(loss.grad))
            self.samples[-1] += len(batch[0] if isinstance(batch, list) else batch)
            if self.passes.is_within_step:
                continue
            if self.left is not None and self.left() == 0:
                return
            self.loader.resize_now(sizes[len(self.steps) % len(sizes)] * (self.loader.delivery_size or 1))


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(count=st.integers(3, 60), delivery=st.integers(1, 9), first=st.integers(1, 4), sizes=SIZES, drop=st.booleans())
def test_every_sample_has_the_same_weight_in_its_step(count, delivery, first, sizes, drop):
    loader = AdaptiveLoader(TensorDataset(torch.arange(count)), min(delivery, count), drop_last=drop)
    loop = Loop(loader, first if min(delivery, count) * first <= count else 1)
    for _ in range(2):
        loop.epoch([min(size, max(1, count // min(delivery, count))) for size in sizes])
    kept = count // min(delivery, count) * min(delivery, count) if drop else count
    assert sum(loop.samples) == 2 * kept
    assert [sum(weights) for weights in loop.steps] == pytest.approx([1.0] * len(loop.steps))


@given(count=st.integers(12, 60), delivery=st.integers(1, 4), steps=st.integers(1, 40), sizes=SIZES)
def test_a_budget_of_steps_is_spent_to_the_sample(count, delivery, steps, sizes):
    loader = AdaptiveLoader(TensorDataset(torch.arange(count)), delivery)
    loop = Loop(loader, 2, budget=steps)
    while loop.left() > 0:
        loop.epoch(sizes)
    per_epoch = -(-count // (2 * delivery))
    assert sum(loop.samples) == steps // per_epoch * count + steps % per_epoch * 2 * delivery
    assert [sum(weights) for weights in loop.steps] == pytest.approx([1.0] * len(loop.steps))


def test_an_epoch_of_a_stream_ends_with_its_samples():
    loop = Loop(AdaptiveLoader(Stream(), 4, epoch_samples=30), 2)
    loop.epoch([3, 1])
    assert loop.samples == [8, 4, 12, 4, 2]
    assert [sum(weights) for weights in loop.steps] == pytest.approx([1.0] * 5)


# Sizes in multiples of a pass, and a learning rate that belongs to them


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
