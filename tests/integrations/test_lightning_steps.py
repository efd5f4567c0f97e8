"""Lightning with steps of several passes: decisions within epochs, `max_steps`, step schedules, resume by steps."""

import csv
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

from divebatch import AdaptiveLoader, DiveBatch, Fixed, Policy, gradient_diversity
from divebatch.errors import ArgumentError, CheckpointError
from integrations.plain_loop import Kept, Numbered, assert_same_sums, each_once
from integrations.step_courses import NUM_TEXTS, BySteps, TinyGpt2, cosine, size_of, texts, whole_steps
from reference.per_sample import mean_loss, mlp, sum_loss

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
BatchSizeCallback = pytest.importorskip("divebatch.integrations.lightning").BatchSizeCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
WAYS = {"within-epochs": {"every_steps": 4}, "whole-batches": {}, "passes": {"passes": 2}}
"""Decisions every four steps, by passes; at the ends of epochs, by larger batches, and by passes."""


class Gpt2(pl.LightningModule):
    """Its schedule is as long as Lightning says that training will be."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGpt2()
        self.seen: list[int] = []
        self.rates: list[float] = []
        self.passes: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, ids = batch
        self.seen += number.tolist()
        self.passes.add(len(number))
        return self.model(ids)

    def on_train_start(self) -> None:
        hook = self.trainer.optimizers[0].register_step_pre_hook
        hook(lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.01)
        scheduler = cosine(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Run:
    """One fit of the tiny GPT-2."""

    def __init__(self, policy: Policy, *, every_steps: int | None = None, passes: int = 1, **settings: Any) -> None:
        self.loader = AdaptiveLoader(texts(), settings.pop("batch_size", 6), seed=3)
        self.callback = BatchSizeCallback(self.loader, policy, lr_coupling="sqrt", every_steps=every_steps)
        self.module = Gpt2()
        folder = settings.pop("folder", None)
        saver = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")
        self.trainer = pl.Trainer(
            accumulate_grad_batches=passes,
            reload_dataloaders_every_n_epochs=1,
            callbacks=[self.callback, *([saver] if folder else [])],
            enable_checkpointing=folder is not None,
            **{**QUIET, **settings},
        )

    def fit(self, **settings: Any) -> "Run":
        self.trainer.fit(self.module, self.loader, **settings)
        return self

    @property
    def scheduler(self) -> Any:
        return self.trainer.lr_scheduler_configs[0].scheduler


def epochs_of(seen: list[int]) -> list[list[int]]:
    return [seen[at : at + NUM_TEXTS] for at in range(0, len(seen), NUM_TEXTS)]


def same_weights(one: Any, other: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


# The same as a plain loop


@pytest.mark.parametrize("passes", [1, 2])
def test_decisions_within_an_epoch_are_the_plain_loops(passes: int):
    """Steps of several passes with a short last one, by `max_steps`, whose schedule ends at its floor."""
    steps = 3 * 16 // passes
    run = Run(BySteps(), every_steps=4, passes=passes, max_steps=steps).fit()
    expected = whole_steps(BySteps(), unit=6, batch_size=6 * passes, every_steps=4, steps=steps)
    facts = [
        [(r.epoch, r.batch_size, r.steps, r.samples, r.next_batch_size, r.changes) for r in records]
        for records in (run.callback.records, expected.records)
    ]
    assert facts[0] == facts[1]
    assert any(record.changes for record in expected.records)
    measured = [(r.diversity, e.diversity) for r, e in zip(run.callback.records, expected.records, strict=True)]
    known = [pair for pair in measured if pair != (None, None)]
    assert known
    assert [ours for ours, _ in known] == pytest.approx([theirs for _, theirs in known], rel=1e-3)
    assert run.module.rates == pytest.approx(expected.rates)
    assert size_of(run.module) == pytest.approx(size_of(expected.model), rel=1e-5)
    assert each_once(epochs_of(run.module.seen), NUM_TEXTS)
    assert run.module.passes == {6, 5}  # memory stays what it was
    assert run.scheduler.last_epoch == expected.scheduler.last_epoch == steps
    assert run.trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    assert (run.trainer.accumulate_grad_batches, run.trainer.max_steps) == (passes, steps)  # as they were


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(6, 18, 12, 30), (12, 6)], ids=["grows", "shrinks"])
def test_max_steps_counts_samples_of_the_first_batch_size(way: str, sizes: tuple[int, ...]):
    first = 12 if way == "passes" else sizes[0]
    batch_size = first // WAYS[way].get("passes", 1)
    run = Run(BySteps(sizes=sizes), batch_size=batch_size, max_steps=20, **WAYS[way]).fit()
    whole, rest = divmod(20, -(-NUM_TEXTS // first))  # epochs, and steps of one more
    assert len(run.module.seen) == whole * NUM_TEXTS + rest * first
    assert run.scheduler.last_epoch == 20
    assert run.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
def test_loggers_hear_of_decisions_within_an_epoch(tmp_path: Path):
    logger = pl.loggers.CSVLogger(tmp_path)
    run = Run(BySteps(), every_steps=4, max_steps=16, logger=logger).fit()
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    logged = [(int(row["step"]), float(row["divebatch/batch_size"])) for row in rows if row["divebatch/batch_size"]]
    (record,) = run.callback.records
    assert record.changes
    assert set(logged) >= {(change[0], change[1]) for change in record.changes}


# Checkpoints by steps


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumed_after_any_step_is_the_whole_run(way: str, tmp_path: Path):
    whole = Run(BySteps(), max_steps=20, folder=tmp_path, **WAYS[way]).fit()
    ends = {record.steps for record in whole.callback.records}
    middle = next(step for step in range(2, 40) if step not in ends)
    for step in (middle, min(ends)):  # after an epoch's last step Lightning leaves out the epoch's end
        resumed = Run(BySteps(), max_steps=20, **WAYS[way]).fit(ckpt_path=tmp_path / f"step={step}.ckpt")
        assert same_weights(resumed.module, whole.module)
        assert whole.module.seen[-len(resumed.module.seen) :] == resumed.module.seen
        records = resumed.callback.records
        assert records == whole.callback.records[-len(records) :]
        assert resumed.scheduler.last_epoch == 20


@pytest.mark.parametrize("stop", [5, 16], ids=["in-an-epoch", "at-its-end"])
def test_a_training_that_gets_more_steps_goes_on(stop: int, tmp_path: Path):
    class Constant(Gpt2):
        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=0.01)  # a schedule would have another length

    runs = [Run(Fixed(), every_steps=2, max_steps=steps) for steps in (32, stop, 32)]
    for run in runs:
        run.module = Constant()
    whole, first = runs[0].fit(), runs[1].fit()
    first.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    more = runs[2].fit(ckpt_path=tmp_path / "stopped.ckpt")
    assert first.module.seen + more.module.seen == whole.module.seen
    assert same_weights(more.module, whole.module)


def test_passes_of_another_size_are_refused(tmp_path: Path):
    Run(Fixed(), every_steps=2, max_steps=3, folder=tmp_path).fit()
    with pytest.raises(CheckpointError, match="had 6 samples in the checkpoint and has 5 here"):
        Run(Fixed(), every_steps=2, max_steps=3, batch_size=5).fit(ckpt_path=tmp_path / "step=2.ckpt")


def test_a_checkpoint_between_passes_is_warned_of(tmp_path: Path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "between.ckpt")

    run = Run(Fixed(), passes=2, max_steps=1)
    run.trainer.callbacks.append(Save())
    with pytest.warns(UserWarning, match="saved between the passes of an optimizer step"):
        run.fit()


# Losses and norms of short last steps


class Regression(pl.LightningModule):
    def __init__(self, loss: Any = mean_loss, lr: float = 0.01) -> None:
        super().__init__()
        self.net, self.loss, self.lr = mlp(dtype=torch.float32), loss, lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr)


def fit(module: Any, loader: Any, *callbacks: Any, **settings: Any) -> Any:
    trainer = pl.Trainer(callbacks=list(callbacks), enable_checkpointing=False, **{**QUIET, **settings})
    trainer.fit(module, loader)
    return trainer


@pytest.mark.parametrize("loss", [mean_loss, sum_loss], ids=["mean", "sum"])
def test_a_short_last_step_has_the_weight_of_its_samples(loss: Any):
    """42 samples in passes of 5 and steps of 15: the last step has passes of 5, 5 and 2."""
    module, kept = Regression(loss), Kept()
    loader = AdaptiveLoader(Numbered(42), 15, delivery_size=5, seed=3)
    reduction = "mean" if loss is mean_loss else "sum"
    policy = DiveBatch(0.1, 45, monotone=False)
    fit(module, loader, BatchSizeCallback(loader, policy, estimator=kept, loss_reduction=reduction), max_epochs=1)
    net = mlp(dtype=torch.float32)
    optimizer = SGD(net.parameters(), lr=0.01)
    for _, x, y in AdaptiveLoader(Numbered(42), 15, seed=3):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    assert size_of(module.net) == pytest.approx(size_of(net), rel=1e-5)
    assert kept.sums.num_samples == 42


def test_the_measured_sums_are_exact_at_fixed_weights():
    module, kept = Regression(lr=0.0), Kept()
    loader = AdaptiveLoader(Numbered(42), 15, delivery_size=5, seed=3)
    fit(module, loader, BatchSizeCallback(loader, DiveBatch(0.1, 45), estimator=kept), max_epochs=1)
    exact = gradient_diversity(module.net, mean_loss, ((x, y) for _, x, y in loader.full_pass()))
    assert_same_sums(kept.sums, exact, rel=1e-5)


# What is refused


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return chain.from_iterable(iter(texts()) for _ in range(3))


def test_what_would_go_wrong_is_refused():
    run = Run(Fixed(), every_steps=2, max_epochs=2)
    run.trainer.callbacks.insert(1, pl.callbacks.GradientAccumulationScheduler(scheduling={1: 2}))
    with pytest.raises(ArgumentError, match=r"accumulate_grad_batches went from 1 to .* GradientAccumulationScheduler"):
        run.fit()
    manual = Run(Fixed(), every_steps=2, max_epochs=1)
    manual.module.automatic_optimization = False
    with pytest.raises(ArgumentError, match="automatic_optimization=False"):
        manual.fit()
    frequent = Run(Fixed(), max_epochs=1)
    frequent.module.configure_optimizers = lambda: [
        [optimizer := SGD(frequent.module.parameters(), lr=0.1)],
        [{"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 2}],
    ]
    with pytest.raises(ArgumentError, match="StepLR has interval='step' and frequency=2"):
        frequent.fit()


def test_loaders_that_cannot_deliver_passes_are_refused():
    both = AdaptiveLoader(texts(), 12, delivery_size=6)
    with pytest.raises(ArgumentError, match=r"accumulate_grad_batches=2 and .*delivery_size=6"):
        fit(Gpt2(), both, BatchSizeCallback(both, Fixed()), max_epochs=1, accumulate_grad_batches=2)
    uneven = AdaptiveLoader(texts(), 12, delivery_size=5)
    with pytest.raises(ArgumentError, match="batch_size=12 is no multiple of delivery_size=5"):
        fit(Gpt2(), uneven, BatchSizeCallback(uneven, Fixed()), max_epochs=1)
    stream = AdaptiveLoader(Endless(), 12)
    with pytest.raises(ArgumentError, match="which this stream lacks: pass AdaptiveLoader"):
        fit(Gpt2(), stream, BatchSizeCallback(stream, Fixed(), every_steps=2), max_epochs=1)
