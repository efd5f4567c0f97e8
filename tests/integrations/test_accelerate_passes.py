"""Accelerate with steps of several passes: the plain loop's course, the epoch's end, resume in the middle of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from divebatch import AdaptiveLoader, DiveBatch, Fixed, Policy, gradient_diversity
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from integrations.plain_loop import Kept, Numbered, assert_same_sums, each_once
from integrations.step_courses import NUM_TEXTS, BySteps, TinyGpt2, cosine, size_of, texts, whole_steps
from reference.per_sample import mean_loss, mlp

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
make_controller = pytest.importorskip("divebatch.integrations.accelerate").make_controller

# Torch counts a fresh optimizer's own steps and cannot know that the epoch's were made before the stop.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Its state is one for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """The loop of Accelerate's own documentation, on the tiny GPT-2."""

    def __init__(self, policy: Policy, *, passes: int = 2, epochs: int = 3, **settings: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=passes)
        of_loader = {key: settings.pop(key) for key in ("delivery_size",) if key in settings}
        self.loader = AdaptiveLoader(texts(), settings.pop("batch_size", 6), seed=3, **of_loader)
        net, self.epochs = TinyGpt2(), epochs
        optimizer = AdamW(net.parameters(), lr=0.01)
        per_epoch = -(-NUM_TEXTS // (self.loader.batch_size * passes))
        parts = self.accelerator.prepare(net, optimizer, cosine(optimizer, epochs * per_epoch))
        self.model, self.optimizer, self.scheduler = parts
        parts = (self.accelerator, self.model, self.optimizer, self.loader, policy)
        settings = {"lr_coupling": "sqrt", **settings}
        self.control = make_controller(*parts, scheduler=self.scheduler, scheduler_unit="step", **settings)
        optimizer.register_step_pre_hook(lambda o, *_: self.rates.append(o.param_groups[0]["lr"]))
        self.records: list[Any] = []
        self.seen: list[int] = []
        self.rates: list[float] = []

    def train(self, *, stop_after: int | None = None) -> "Run":
        while self.loader.epoch < self.epochs:
            for number, ids in self.loader:
                self.seen += number.tolist()
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(ids))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if len(self.rates) == stop_after and self.accelerator.sync_gradients:
                    return self
            self.records.append(self.control.step())
        return self


@pytest.mark.parametrize("told", [{"passes": 2}, {"passes": 1, "batch_size": 12, "delivery_size": 6}], ids=str)
def test_decisions_within_an_epoch_are_the_plain_loops(told: dict[str, int]):
    run = Run(BySteps(), every_steps=4, **told).train()
    expected = whole_steps(BySteps(), unit=6, batch_size=12, every_steps=4, steps=24)
    facts = [
        [(r.epoch, r.batch_size, r.steps, r.samples, r.next_batch_size, r.changes) for r in records]
        for records in (run.records, expected.records)
    ]
    assert facts[0] == facts[1]
    assert run.rates == pytest.approx(expected.rates)
    assert size_of(run.model) == pytest.approx(size_of(expected.model), rel=1e-5)
    assert each_once([run.seen[at : at + NUM_TEXTS] for at in range(0, len(run.seen), NUM_TEXTS)], NUM_TEXTS)
    assert run.scheduler.scheduler.last_epoch == 24
    assert run.optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("step", [5, 7], ids=["in-an-epoch", "after-its-last-step"])
def test_a_resumed_run_is_the_whole_run(step: int, tmp_path: Path):
    settings: dict[str, Any] = {"every_steps": 4, "epochs": 2}
    whole = Run(BySteps(), **settings).train()
    assert (whole.records[0].steps == step) == (step == 7)
    first = Run(BySteps(), **settings).train(stop_after=step)
    first.accelerator.save_state(str(tmp_path))
    resumed = Run(BySteps(), **settings)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train()
    assert first.records + resumed.records == whole.records
    assert first.seen + resumed.seen == whole.seen
    assert all(torch.equal(*pair) for pair in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    assert resumed.scheduler.scheduler.last_epoch == 16


def test_states_that_do_not_fit_are_refused(tmp_path: Path):
    run = Run(Fixed()).train(stop_after=1)
    run.accelerator.save_state(str(tmp_path))
    other = Run(Fixed(), batch_size=5)
    with pytest.raises(CheckpointError, match="had 6 samples in the checkpoint and has 5 here"):
        other.accelerator.load_state(str(tmp_path))
    between = Run(Fixed())
    for _ in between.loader:
        with pytest.raises(UsageError, match="between the passes of an optimizer step"):
            between.accelerator.save_state(str(tmp_path))
        break


def test_both_ways_to_say_what_a_pass_is_are_refused():
    with pytest.raises(ArgumentError, match=r"gradient_accumulation_steps=2 and .*delivery_size=6"):
        Run(Fixed(), passes=2, batch_size=12, delivery_size=6)


def test_an_accelerator_whose_number_of_passes_has_changed_is_refused():
    run = Run(Fixed(), epochs=1).train()
    again = AdaptiveLoader(texts(), 6)
    with pytest.raises(ArgumentError, match="make a new Accelerator"):
        make_controller(run.accelerator, run.model, run.optimizer, again, Fixed(), scheduler=run.scheduler)


def test_the_measured_sums_are_exact_at_fixed_weights():
    """42 samples in passes of 5 and steps of 15: the last step has passes of 5, 5 and 2."""
    accelerator, kept = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3), Kept()
    net = mlp(dtype=torch.float32)
    model, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=0.0))
    loader = AdaptiveLoader(Numbered(42), 5, seed=3)
    control = make_controller(accelerator, model, optimizer, loader, DiveBatch(0.1, 45), estimator=kept)
    gradients = []
    for _, x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model(x), y))
            if accelerator.sync_gradients:
                gradients.append(net[0].weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    control.step()
    exact = gradient_diversity(net, mean_loss, ((x, y) for _, x, y in loader.full_pass()))
    assert_same_sums(kept.sums, exact, rel=1e-5)
    expected = []
    for _, x, y in AdaptiveLoader(Numbered(42), 15, seed=3):
        expected += torch.autograd.grad(mean_loss(net(x), y), [net[0].weight])
    assert len(gradients) == len(expected) == 3
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(gradients, expected, strict=True))
