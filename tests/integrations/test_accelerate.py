"""Accelerate with our controller: the plain loop's course, every sample, exact resume; the rest refused."""

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

from divebatch import (
    AdaptiveLoader,
    Controller,
    DiveBatch,
    Fixed,
    Policy,
    gradient_diversity,
    micro_batches,
)
from divebatch.errors import ArgumentError
from divebatch.policies import NoiseDoubling
from integrations.plain_loop import (
    Kept,
    Numbered,
    assert_same_sums,
    each_once,
    plain_records,
    schedule,
)
from reference.per_sample import mean_loss, mlp

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
adapter = pytest.importorskip("divebatch.integrations.accelerate")

# Torch counts a fresh optimizer's own steps and cannot know that the epoch's were made before the stop.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
DIVEBATCH = DiveBatch(0.1, 24, monotone=False)


class Run:
    """A loop as Accelerate's users write it."""

    def __init__(self, policy: Policy, *, batch_size: int = 6, lr: float = 0.03, **settings: Any) -> None:
        estimator, kind = settings.pop("estimator", None), settings.pop("optimizer", SGD)
        coupling = settings.pop("lr_coupling", "linear")
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        model = mlp(dtype=torch.float32)
        optimizer = kind(model.parameters(), lr=lr)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, schedule(optimizer))
        self.loader = AdaptiveLoader(Numbered(), batch_size, seed=3)
        parts = (self.accelerator, self.model, self.optimizer, self.loader, policy)
        self.control = adapter.make_controller(
            *parts, scheduler=self.scheduler, lr_coupling=coupling, estimator=estimator
        )
        self.records: list[Any] = []
        self.seen: dict[int, list[int]] = {}

    def train(self, *, epochs: int = 5, stop_in_epoch_3: bool = False, part_size: int = 48) -> "Run":
        while self.loader.epoch < epochs:
            epoch = self.loader.epoch
            for batch in self.loader:
                self.optimizer.zero_grad()
                for (number, x, y), factor in micro_batches(batch, part_size):
                    self.seen.setdefault(epoch, []).extend(number.tolist())
                    self.accelerator.backward(mean_loss(self.model(x), y) * factor)
                self.optimizer.step()
                if stop_in_epoch_3 and epoch == 2:
                    return self
            self.scheduler.step()
            self.records.append(self.control.step())
        return self


def test_the_course_is_the_plain_loops():
    run = Run(DIVEBATCH).train()
    assert run.records == plain_records(mlp(dtype=torch.float32), DIVEBATCH, epochs=5, lr_coupling="linear")
    assert each_once(run.seen.values())


@pytest.mark.parametrize("stop_in_epoch_3", [False, True])
def test_a_resumed_run_is_the_whole_run(stop_in_epoch_3, tmp_path):
    whole = Run(DIVEBATCH).train()
    first = Run(DIVEBATCH).train(epochs=3 if stop_in_epoch_3 else 2, stop_in_epoch_3=stop_in_epoch_3)
    first.accelerator.save_state(str(tmp_path))
    resumed = Run(DIVEBATCH, batch_size=5)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train()
    assert first.records + resumed.records == whole.records
    assert first.seen.get(2, []) + resumed.seen[2] == whole.seen[2]
    for here, there in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("part_size", [48, 5], ids=["whole", "cut"])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 0.05)])
def test_the_measured_sums_are_exact_at_fixed_weights(precision, tolerance, part_size):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the whole process
    kept = Kept()
    run = Run(DIVEBATCH, lr=0.0, mixed_precision=precision, estimator=kept).train(epochs=1, part_size=part_size)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = mlp(dtype=torch.float32)
    exact = gradient_diversity(model, mean_loss, ((x, y) for _, x, y in run.loader.full_pass()))
    assert_same_sums(kept.sums, exact, rel=tolerance)


def test_what_would_go_wrong_is_refused():
    run = Run(Fixed())
    parts = (run.accelerator, run.model, run.optimizer)
    with pytest.raises(ArgumentError, match=r"got DataLoaderShard: leave the loader out of accelerator.prepare"):
        adapter.make_controller(*parts, run.accelerator.prepare(DataLoader(Numbered())), Fixed())
    with pytest.raises(ArgumentError, match="belongs to an accelerator already"):
        adapter.make_controller(*parts, run.loader, Fixed(), scheduler=run.scheduler)


@pytest.mark.parametrize("prepared", ["optimizer", "scheduler"])
def test_a_plain_controller_of_prepared_parts_names_the_way_out(prepared: str):
    model = mlp(dtype=torch.float32)
    parts: dict[str, Any] = {"optimizer": SGD(model.parameters(), lr=0.03)}
    parts["scheduler"] = schedule(parts["optimizer"])
    parts[prepared] = accelerate.Accelerator(cpu=True).prepare(parts[prepared])
    with pytest.raises(ArgumentError, match=r"made by accelerator\.prepare.*make_controller\(accelerator"):
        Controller(model, loader=AdaptiveLoader(Numbered(), 6), policy=Fixed(), **parts)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_auto_needs_nothing_else(is_scaled: bool):
    accelerator = accelerate.Accelerator(cpu=True)
    if is_scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    model = mlp(dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = AdaptiveLoader(Numbered(), 6, seed=3)
    control = adapter.make_controller(accelerator, model, optimizer, loader, NoiseDoubling(24))
    for _, x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(mean_loss(model(x), y))
        optimizer.step()
    assert control.step().measured
    state = control.state_dict()
    assert (state["settings"]["estimator"], state["settings"]["lr_coupling"][0]) == ("Moments", "sqrt")


def test_the_rates_of_several_optimizers_follow():
    accelerator, net = accelerate.Accelerator(cpu=True), mlp(dtype=torch.float32)
    raw = [SGD(net[0].parameters(), lr=0.03), torch.optim.AdamW(net[2].parameters(), lr=0.01)]
    model, *optimizers = accelerator.prepare(net, *raw)
    loader = AdaptiveLoader(Numbered(), 6, seed=3)
    control = adapter.make_controller(accelerator, model, optimizers, loader, Fixed(), lr_coupling=["linear", "sqrt"])
    loader.batch_size, used = 24, []
    for each in raw:
        each.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    for _ in loader:
        for each in optimizers:
            each.step()
    assert used == pytest.approx([0.12, 0.02] * 2)
    assert [each.param_groups[0]["lr"] for each in raw] == [0.03, 0.01]
    control.step()
