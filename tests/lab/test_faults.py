"""Runs that stop or diverge: what is on disk afterwards, and what a resume makes of it."""

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import CheckpointError, DivergedError, RecordError, StoppedError
from divebatch.lab import Run, StopRequest, execute, get_experiment, load_checkpoint
from divebatch.lab.checkpoint import previous
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.runs import _Keeper
from divebatch.lab.schema import Experiment, Method, Part
from lab.compare_runs import CPU, assert_same_end, records
from lab.data.image_files import write_cifar10


def small(name: str = "synthetic-nonconvex", epochs: int = 3) -> Experiment:
    experiment = get_experiment(name).scaled(epochs)
    settings = {**experiment.data.settings, "num_samples": 300, "num_features": 8}
    methods = {name: eager(method) for name, method in experiment.methods.items() if method.policy.kind != "fixed"}
    return replace(experiment, data=replace(experiment.data, settings=settings), methods=methods)


def eager(method: Method) -> Method:
    """From a small batch, soon to a larger one."""
    return replace(method, batch_size=48, policy=replace(method.policy, settings={"delta": 8.0, "max_batch_size": 200}))


def with_method(experiment: Experiment, **settings: Any) -> Experiment:
    return replace(experiment, methods={"divebatch": Method(label="it", **settings)})


# Stopped after any step


class StopAfter(StopRequest):
    """Asked to stop when so many steps were made."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps


@pytest.fixture
def counting(monkeypatch) -> None:
    after_step = _Keeper._after_step

    def counted(saver: _Keeper) -> None:
        stop = saver.stop
        if isinstance(stop, StopAfter):
            stop.steps -= 1
            stop.is_set = stop.steps == 0
        after_step(saver)

    monkeypatch.setattr(_Keeper, "_after_step", counted)


def stopped(run: Run, steps: int, *, resume: bool) -> bool:
    try:
        execute(run, resume=resume, stop=StopAfter(steps))
    except StoppedError:
        return True
    return False


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("checkpoint_steps", [None, 2])
def test_stopped_after_any_step_it_resumes_to_the_same_bits(tmp_path, checkpoint_steps):
    whole = Run(small(), "divebatch", 0, tmp_path / "whole")
    execute(whole)
    sizes = [line["batch_size"] for line in records(whole)]
    assert len(set(sizes)) > 1, sizes
    for steps in range(1, records(whole)[-1]["steps"]):
        broken = Run(small(), "divebatch", 0, tmp_path / f"{steps}", checkpoint_steps=checkpoint_steps)
        assert stopped(broken, steps, resume=False)
        execute(broken, resume=True)
        assert_same_end(broken, whole)


@pytest.mark.usefixtures("counting")
def test_quantized_gradients_resume_to_the_same_bits(tmp_path):
    name, experiment = "divebatch-16-levels", small("inducing")
    whole, broken = (Run(experiment, name, 0, tmp_path / folder) for folder in ("whole", "broken"))
    execute(whole)
    lives = 1
    while stopped(broken, 3, resume=lives > 1):
        lives += 1
    assert lives > 2
    assert_same_end(broken, whole)


@dataclass(frozen=True, kw_only=True)
class DroppingNet(ModelSettings):
    """Convolutions, BatchNorm and dropout: buffers and random numbers that a resume must bring back."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        conv = nn.Conv2d(3, 4, 5, stride=4, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(196, 10))


@pytest.fixture
def images(tmp_path, monkeypatch) -> tuple[Experiment, Path]:
    """Real file format, augmentation, momentum, sketched norms, cosine with warm-up."""
    monkeypatch.setitem(MODELS, "dropping-net", DroppingNet)
    write_cifar10(tmp_path / "data", per_file=8)
    method = {"batch_size": 8, "lr": 0.1, "lr_coupling": "linear", "warmup_epochs": 2}
    policy = Part(kind="divebatch", settings={"delta": 0.3, "max_batch_size": 32})
    experiment = get_experiment("cifar10").scaled(4).with_model("dropping-net")
    return with_method(experiment, **method, policy=policy), tmp_path / "data"


@pytest.mark.usefixtures("counting")
def test_images_with_dropout_and_sketches_resume_to_the_same_bits(tmp_path, images):
    steps = 3
    experiment, data = images
    whole = Run(experiment, "divebatch", 0, tmp_path / "whole", data_dir=data)
    execute(whole)
    assert len({line["batch_size"] for line in records(whole)}) > 1
    broken = Run(experiment, "divebatch", 0, tmp_path / "broken", data_dir=data)
    lives = 1
    while stopped(broken, steps, resume=lives > 1):
        lives += 1
    assert lives >= records(whole)[-1]["steps"] // steps
    assert_same_end(broken, whole)


def test_what_ran_before_in_a_process_does_not_matter(tmp_path, images):
    """Signs of sketches come from a source that all runs of a process share."""
    experiment, data = images
    first, second = (Run(experiment, "divebatch", 0, tmp_path / name, data_dir=data) for name in ("a", "b"))
    execute(first)
    execute(Run(experiment, "divebatch", 1, tmp_path / "a", data_dir=data))
    execute(second)
    assert_same_end(second, first)


# Odd moments


def test_a_kill_right_before_the_last_checkpoint_still_ends_with_the_last_weights(tmp_path):
    whole, broken = Run(small(), "divebatch", 0, tmp_path / "a"), Run(small(), "divebatch", 0, tmp_path / "b")
    for run in (whole, broken):
        execute(run)
    previous(broken.checkpoint_path).replace(broken.checkpoint_path)  # all records, one epoch of weights missing
    execute(broken, resume=True)
    assert_same_end(broken, whole)


def test_a_complete_run_needs_no_checkpoint(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run)
    before = run.records_path.read_text()
    for damage in (lambda path: path.write_bytes(b"bad"), Path.unlink):
        for path in (run.checkpoint_path, previous(run.checkpoint_path)):
            damage(path)
        execute(run, resume=True)
        assert run.records_path.read_text() == before


def test_records_with_a_hole_are_refused(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run)
    lines = run.records_path.read_text().splitlines(keepends=True)
    run.records_path.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ValueError, match="was changed after its checkpoint"):
        execute(run, resume=True)


@pytest.mark.parametrize(("most_bytes", "error"), [(100, RecordError), (5_000, CheckpointError)])
def test_a_full_disk_names_the_file_and_a_resume_goes_on(tmp_path, most_bytes, error):
    """The system refuses to let any file grow beyond the limit, in the middle of a write."""
    whole, broken = Run(small(), "divebatch", 0, tmp_path / "a"), Run(small(), "divebatch", 0, tmp_path / "b")
    execute(whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        with pytest.raises(error, match=r"seed-0\.(jsonl|ckpt)': File too large"):
            execute(broken)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    execute(broken, resume=True)
    assert_same_end(broken, whole)


# Divergence


def diverging(batch_size: int) -> Experiment:
    """Two good epochs, then a rate that few weights survive."""
    schedule = Part(kind="step", settings={"factor": 1e38, "every_epochs": 2})
    method = {"batch_size": batch_size, "lr": 1.0, "policy": Part(kind="fixed")}
    return with_method(replace(small(epochs=5), schedule=schedule), **method)


@pytest.fixture
def overflowing(monkeypatch) -> None:
    """In epoch 3 a step whose loss is good leaves weights that are not."""
    after_step = _Keeper._after_step

    def overflowed(saver: _Keeper) -> None:
        if saver.trainer.control.epoch == 2:
            next(saver.trainer.model.parameters()).data.fill_(torch.inf)
        after_step(saver)

    monkeypatch.setattr(_Keeper, "_after_step", overflowed)


@pytest.mark.parametrize("cause", ["loss", "weights"])
@pytest.mark.parametrize("checkpoint_steps", [None, 1])
def test_divergence_leaves_a_good_checkpoint_and_good_records(tmp_path, request, cause, checkpoint_steps):
    if cause == "weights":
        request.getfixturevalue("overflowing")
    batch_size = 48 if cause == "loss" else 240  # one step an epoch: no later loss tells
    run = Run(diverging(batch_size), "divebatch", 0, tmp_path, checkpoint_steps=checkpoint_steps)
    with pytest.raises(DivergedError) as caught:
        execute(run)
    assert f"The last good checkpoint is '{run.checkpoint_path}'" in str(caught.value)
    state = load_checkpoint(run.checkpoint_path, device=CPU)
    assert state["control"]["epoch"] == 2
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert torch.isfinite(state["tally"][0])
    assert [line["epoch"] for line in records(run)] == [1, 2]
    assert all(line[key] is not None for line in records(run) for key in ("train_loss", "val_loss", "val_accuracy"))
    with pytest.raises(DivergedError):  # as often as one tries
        execute(run, resume=True)


def test_divergence_before_any_checkpoint_says_so_and_exits_with_1(tmp_path, monkeypatch):
    experiment = replace(diverging(48), schedule=Part(kind="constant"))
    experiment = with_method(experiment, batch_size=48, lr=1e38, policy=Part(kind="fixed"))
    monkeypatch.setattr("divebatch.lab.get_experiment", lambda *_: experiment)
    answer = CliRunner().invoke(app, ["run", "it", "--jobs", "1", "--trials", "1", "--out", str(tmp_path)])
    assert answer.exit_code == 1
    assert "seed 0: the " in answer.output
    assert "No checkpoint was written yet" in answer.output
