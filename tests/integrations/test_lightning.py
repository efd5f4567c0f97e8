"""Lightning's own loop with our callback: the plain loop's course, every sample, exact resume; the rest refused."""

import csv
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from divebatch import (
    AdaBatch,
    AdaptiveLoader,
    DiveBatch,
    Fixed,
    Policy,
    gradient_diversity,
)
from divebatch.errors import ArgumentError, UsageError
from divebatch.policies import NoiseDoubling
from integrations.plain_loop import (
    GROWS_AND_SHRINKS,
    Course,
    Kept,
    Numbered,
    Watched,
    assert_same_sums,
    each_once,
    plain_records,
    schedule,
)
from reference.adam_by_hand import train_by_hand
from reference.per_sample import mean_loss, mlp, num_hooks

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
BatchSizeCallback = pytest.importorskip("divebatch.integrations.lightning").BatchSizeCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
DIVEBATCH = DiveBatch(0.1, 24, monotone=False)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


def module(
    package: str = "lightning.pytorch",
    *,
    lr: float = 0.03,
    automatic: bool = True,
    scheduler: Any = schedule,
    validates=False,
    optimizer: Any = SGD,
):
    """A LightningModule of that package that notes which samples it saw, epoch by epoch."""
    base = import_module(package).LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(dtype=torch.float32)
            self.seen: dict[int, list[int]] = {}
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            number, x, y = batch
            self.seen.setdefault(self.trainer.current_epoch, []).extend(number.tolist())
            loss = mean_loss(self.net(x), y)
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()
            return None

        def configure_optimizers(self) -> Any:
            made = optimizer(self.net.parameters(), lr=lr)
            return [made], [scheduler(made)]

    if validates:
        Module.validation_step = lambda self, batch, index: self.log("loss", mean_loss(self.net(batch[1]), batch[2]))
    return Module()


class Run:
    """One fit, with all that it is made of."""

    def __init__(self, policy: Policy, *, package: str = "lightning.pytorch", epochs: int = 5, **settings: Any) -> None:
        of_callback = {key: settings.pop(key) for key in ("lr_coupling", "estimator") if key in settings}
        names = ("lr", "automatic", "scheduler", "validates", "optimizer")
        of_module = {key: settings.pop(key) for key in names if key in settings}
        self.loader = AdaptiveLoader(Numbered(), settings.pop("batch_size", 6), seed=3)
        self.callback = BatchSizeCallback(self.loader, policy, **of_callback)
        self.module = module(package, **of_module)
        callbacks = [self.callback, *settings.pop("callbacks", [])]
        settings = {**QUIET, "accelerator": "cpu", "reload_dataloaders_every_n_epochs": 1, **settings}
        self.trainer = import_module(package).Trainer(max_epochs=epochs, callbacks=callbacks, **settings)

    def fit(self, *, loader: Any = None, **settings: Any) -> "Run":
        self.trainer.fit(self.module, loader or self.loader, **settings)
        return self


def course(records: Any) -> list[tuple[Any, ...]]:
    """What two runs must agree on, to the last bit."""
    return [(r.epoch, r.batch_size, r.lr, r.samples, r.diversity, r.next_batch_size, r.next_lr) for r in records]


def net() -> nn.Sequential:
    return mlp(dtype=torch.float32)


# The same as the plain loop


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_the_course_is_the_plain_loops(package, automatic):
    pytest.importorskip(package, reason=f"{package} is not installed")
    run = Run(DIVEBATCH, package=package, automatic=automatic, lr_coupling="linear").fit()
    expected = plain_records(net(), DIVEBATCH, epochs=5, lr_coupling="linear")
    assert course(run.callback.records) == course(expected)
    sizes = [record.batch_size for record in expected]
    assert max(sizes) > sizes[0] > min(sizes)  # it grows and it shrinks
    assert [record.steps for record in run.callback.records] == [record.steps for record in expected]
    assert each_once(run.module.seen.values())
    assert num_hooks(run.module) == 0


def test_adams_settings_follow_as_in_a_loop_that_sets_them_by_hand(tmp_path):
    settings = {"optimizer": AdamW, "lr_coupling": "adam"}
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=2)
    run = Run(Course(GROWS_AND_SHRINKS), callbacks=[saver], enable_checkpointing=True, **settings).fit()
    twin = net()
    sizes = {"sizes": GROWS_AND_SHRINKS, "schedule": lambda epoch: 0.5 ** (epoch // 2)}
    train_by_hand(twin, AdamW(twin.parameters(), lr=0.03), AdaptiveLoader(Numbered(), 6, seed=3), **sizes)
    path = sorted(tmp_path.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)[0]
    resumed = Run(Course(GROWS_AND_SHRINKS), **settings).fit(ckpt_path=path)
    for each in (run, resumed):
        assert all(torch.equal(*pair) for pair in zip(each.module.net.parameters(), twin.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # plain SGD has no momentum
def test_an_estimate_from_steps_is_the_plain_loops():
    """Lightning makes gradients within the step, by a closure."""
    policy = Watched((6, 6, 6))
    measured, expected = (
        Run(policy, epochs=3, estimator="moments").fit(),
        plain_records(net(), policy, epochs=3, estimator="moments"),
    )
    assert course(measured.callback.records) == course(expected)
    assert expected[0].diversity is not None


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.05)])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_measured_sums_are_exact_at_fixed_weights(passes, precision, tolerance):
    kept = Kept()
    settings = {"accumulate_grad_batches": passes, "precision": precision, "estimator": kept}
    run = Run(DIVEBATCH, lr=0.0, epochs=1, **settings).fit()
    exact = gradient_diversity(run.module.net, mean_loss, ((x, y) for _, x, y in run.loader.full_pass()))
    assert_same_sums(kept.sums, exact, rel=tolerance)


def test_with_accumulation_the_policy_sets_the_optimizers_batch():
    run = Run(Course((12, 24, 11)), batch_size=3, accumulate_grad_batches=4, epochs=3, lr_coupling="linear").fit()
    records = run.callback.records
    assert [(r.batch_size, r.micro_batch_size) for r in records] == [(12, 3), (24, 3), (9, 3)]
    assert [r.next_lr for r in records] == pytest.approx([0.06, 0.03 / 2 * 9 / 12, 0.03 / 2 * 9 / 12])
    assert each_once(run.module.seen.values())
    assert run.trainer.global_step == 4 + 2 + 6


def test_with_accumulation_the_cap_is_that_of_the_optimizers_batch():
    run = Run(AdaBatch(20, every_epochs=1), batch_size=3, accumulate_grad_batches=4, epochs=2).fit()
    assert [r.batch_size for r in run.callback.records] == [12, 18]  # doubled, capped, in passes of 3
    with pytest.raises(ArgumentError, match="24"):
        Run(AdaBatch(20, every_epochs=1), batch_size=6, accumulate_grad_batches=4, epochs=1).fit()


# Checkpoints


@pytest.mark.parametrize("stop", ["after-epoch-2", "in-epoch-3"])
def test_a_resumed_run_is_the_whole_run(stop, tmp_path):
    whole = Run(DIVEBATCH, lr_coupling="linear").fit()
    saves = {"after-epoch-2": {"every_n_epochs": 2}, "in-epoch-3": {"every_n_train_steps": in_the_third_epoch(whole)}}
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, **saves[stop])
    Run(DIVEBATCH, lr_coupling="linear", callbacks=[saver], enable_checkpointing=True).fit()
    path = sorted(tmp_path.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)[0]
    resumed = Run(DIVEBATCH, lr_coupling="linear", batch_size=5).fit(ckpt_path=path)
    assert course(resumed.callback.records) == course(whole.callback.records)[2:]
    for here, there in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(here, there)
    there_first = whole.module.seen[2][: -len(resumed.module.seen[2])] if stop == "in-epoch-3" else []
    assert len(there_first) == (0 if stop == "after-epoch-2" else 2 * resumed.callback.records[0].batch_size)
    assert there_first + resumed.module.seen[2] == whole.module.seen[2]


def in_the_third_epoch(run: Run) -> int:
    return run.callback.records[1].steps + 2


def test_a_checkpoint_of_before_the_decision_is_decided_on_resume(tmp_path):
    """ModelCheckpoint can save after validation: the epoch's batches are all there, its step() is not."""
    validation = DataLoader(Numbered(), batch_size=48)
    whole = Run(DIVEBATCH, lr_coupling="linear", validates=True).fit(val_dataloaders=validation)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, save_on_train_epoch_end=False, filename="{epoch}")
    saved = Run(DIVEBATCH, lr_coupling="linear", validates=True, callbacks=[saver], enable_checkpointing=True)
    saved.fit(val_dataloaders=validation)
    resumed = Run(DIVEBATCH, lr_coupling="linear", validates=True)
    resumed.fit(val_dataloaders=validation, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert course(resumed.callback.records) == course(whole.callback.records)[1:]
    assert each_once(resumed.module.seen.values())


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_an_epoch_that_max_steps_broke_off_starts_again(tmp_path):
    whole = Run(DIVEBATCH).fit()
    steps = 2 * 48 // 6 + 2  # by samples, of the first batch size
    first = Run(DIVEBATCH, max_steps=steps).fit()
    assert course(first.callback.records) == course(whole.callback.records)[:2]
    first.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = Run(DIVEBATCH).fit(ckpt_path=tmp_path / "stopped.ckpt")
    assert [record.epoch for record in resumed.callback.records] == [3, 4]  # Lightning counts the broken one
    assert each_once(resumed.module.seen.values())


@pytest.mark.parametrize("max_steps", [-1, 3], ids=["after-an-epoch", "in-an-epoch"])
def test_a_checkpoint_without_our_state_is_refused(max_steps, tmp_path):
    bare = pl.Trainer(max_epochs=2, max_steps=max_steps, accelerator="cpu", **QUIET)
    bare.fit(module(), DataLoader(Numbered(), batch_size=6))
    bare.save_checkpoint(tmp_path / "bare.ckpt")
    with pytest.raises(UsageError, match=r"continues after step \d+, but its checkpoint has nothing of this callback"):
        Run(DIVEBATCH).fit(ckpt_path=tmp_path / "bare.ckpt")


def test_a_callback_serves_one_fit():
    run = Run(Fixed(), epochs=1).fit()
    with pytest.raises(UsageError, match="was already used in a fit"):
        run.fit()


# Logs


def test_loggers_get_batch_size_diversity_and_the_true_rate(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    monitor = pl.callbacks.LearningRateMonitor(logging_interval="epoch")
    run = Run(DIVEBATCH, lr_coupling="linear", logger=logger, callbacks=[monitor], epochs=4, log_every_n_steps=1).fit()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    records = run.callback.records
    assert [float(v) for v in column(rows, "divebatch/batch_size")] == [record.batch_size for record in records]
    assert [float(v) for v in column(rows, "divebatch/diversity")] == pytest.approx([r.diversity for r in records])
    assert [float(v) for v in column(rows, "divebatch/lr")] == pytest.approx([record.lr for record in records])
    assert [float(v) for v in column(rows, "lr-SGD")] == [0.03, 0.03, 0.015, 0.015]  # the schedule's own


def column(rows: list[dict[str, str]], name: str) -> list[str]:
    return [row[name] for row in rows if row[name]]


# What would go wrong without a word


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reload_dataloaders_every_n_epochs": 0}, "pass reload_dataloaders_every_n_epochs=1"),
        ({"reload_dataloaders_every_n_epochs": 2}, "pass reload_dataloaders_every_n_epochs=1"),
        ({"limit_train_batches": 3}, "limit_train_batches=3 .* train on a Subset"),
        ({"overfit_batches": 3}, "overfit_batches=3 .* train on a Subset"),
        ({"val_check_interval": 4}, "val_check_interval=4 counts batches"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_lose_samples_are_refused(settings, message):
    with pytest.raises(ArgumentError, match=message):
        Run(Fixed(), **settings).fit()


def test_loaders_other_than_the_callbacks_are_refused():
    with pytest.raises(ArgumentError, match="loader must be an AdaptiveLoader, got DataLoader"):
        BatchSizeCallback(DataLoader(Numbered()), Fixed())
    with pytest.raises(ArgumentError, match=r"the trainer's loader is a DataLoader and not the callback's"):
        Run(Fixed()).fit(loader=DataLoader(Numbered(), batch_size=6))


def test_several_optimizers_are_refused():
    run = Run(Fixed(), automatic=False)
    run.module.configure_optimizers = lambda: [SGD(run.module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ArgumentError, match="one optimizer can be followed, the module has 2"):
        run.fit()


def test_an_accumulation_that_changes_is_refused():
    change = pl.callbacks.GradientAccumulationScheduler(scheduling={1: 2})
    with pytest.raises(UsageError, match="steps once in 2 of the loader's batches"):
        Run(Fixed(), callbacks=[change]).fit()


def test_a_fast_development_run_decides_nothing():
    run = Run(DIVEBATCH, fast_dev_run=True).fit()
    assert run.callback.records == []
    assert num_hooks(run.module) == 0


def test_after_an_error_no_hook_is_left():
    run = Run(DIVEBATCH, accumulate_grad_batches=2)
    run.module.on_before_optimizer_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.fit()
    assert num_hooks(run.module) == 0


@pytest.mark.parametrize("passes", [1, 2])
def test_auto_needs_nothing_else(passes: int):
    loader = AdaptiveLoader(Numbered(), 6, seed=3)
    callback = BatchSizeCallback(loader, NoiseDoubling(24))
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[callback], reload_dataloaders_every_n_epochs=1, accumulate_grad_batches=passes, **QUIET
    )
    trainer.fit(module(), loader)
    assert [record.measured for record in callback.records] == [True, True]
    state = callback.state_dict()
    assert (state["settings"]["estimator"], state["settings"]["lr_coupling"][0]) == ("PerSample", "linear")


class Scaled(pl.plugins.MixedPrecision):
    """Multiplies losses as 16-bit precision does, and computes in 32 bits."""

    def forward_context(self) -> Any:
        return nullcontext()


def test_under_a_grad_scaler_auto_measures_the_same():
    plain = Run(NoiseDoubling(24), epochs=2).fit()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # a power of two: floats stay what they were
    scaled = Run(NoiseDoubling(24), epochs=2, plugins=[Scaled("16-mixed", "cpu", scaler)]).fit()
    assert scaled.trainer.precision_plugin.scaler is scaler
    assert scaled.callback.records == plain.callback.records
    assert plain.callback.records[0].noise_scale is not None
