"""Runs that stop, diverge or lose a file: what is on disk afterwards, and what a resume makes of it."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import CheckpointError, DivergedError, RecordError, StoppedError
from divebatch.lab import Run, execute, get_experiment, load_checkpoint, runs
from divebatch.lab.checkpoint import previous
from divebatch.lab.files import locked
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.runs import _Keeper
from divebatch.lab.schema import Experiment, Method, Part
from divebatch.lab.search import to_toml
from divebatch.records import read_run
from lab.data.image_files import write_cifar10
from lab.helpers import CPU, StopAfter, assert_same_end, kill_after, records, shrunk, small


def growing(name: str = "synthetic-nonconvex", epochs: int = 3) -> Experiment:
    experiment = shrunk(name, epochs, 300, 8)
    methods = {name: eager(method) for name, method in experiment.methods.items() if method.policy.kind != "fixed"}
    return replace(experiment, methods=methods)


def eager(method: Method) -> Method:
    """From a growing batch, soon to a larger one."""
    return replace(method, batch_size=48, policy=replace(method.policy, settings={"delta": 8.0, "max_batch_size": 200}))


def with_method(experiment: Experiment, **settings: Any) -> Experiment:
    return replace(experiment, methods={"divebatch": Method(label="it", **settings)})


# Stopped after any step


def stopped(run: Run, steps: int, *, resume: bool) -> bool:
    try:
        execute(run, resume=resume, stop=StopAfter(steps))
    except StoppedError:
        return True
    return False


def resumed_every(steps: int, broken: Run) -> int:
    """Train in lives of so many steps; return their number."""
    lives = 1
    while stopped(broken, steps, resume=lives > 1):
        lives += 1
    return lives


@pytest.mark.parametrize("checkpoint_steps", [None, 2])
def test_stopped_after_any_step_it_resumes_to_the_same_bits(tmp_path, checkpoint_steps):
    whole = Run(growing(), "divebatch", 0, tmp_path / "whole")
    execute(whole)
    sizes = [line["batch_size"] for line in records(whole)]
    assert len(set(sizes)) > 1, sizes
    for steps in range(1, records(whole)[-1]["steps"]):
        broken = Run(growing(), "divebatch", 0, tmp_path / f"{steps}", checkpoint_steps=checkpoint_steps)
        assert stopped(broken, steps, resume=False)
        execute(broken, resume=True)
        assert_same_end(broken, whole)


def test_quantized_gradients_resume_to_the_same_bits(tmp_path):
    name, experiment = "divebatch-16-levels", growing("inducing")
    whole, broken = (Run(experiment, name, 0, tmp_path / folder) for folder in ("whole", "broken"))
    execute(whole)
    assert resumed_every(3, broken) > 2
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
    experiment = get_experiment("cifar10", ["model.kind=dropping-net"]).scaled(4)
    return with_method(experiment, **method, policy=policy), tmp_path / "data"


def test_images_with_dropout_and_sketches_resume_to_the_same_bits(tmp_path, images):
    experiment, data = images
    whole = Run(experiment, "divebatch", 0, tmp_path / "whole", data_dir=data)
    execute(whole)
    assert len({line["batch_size"] for line in records(whole)}) > 1
    broken = Run(experiment, "divebatch", 0, tmp_path / "broken", data_dir=data)
    assert resumed_every(3, broken) >= records(whole)[-1]["steps"] // 3
    assert_same_end(broken, whole)


# Odd moments


def test_a_kill_right_before_the_last_checkpoint_still_ends_with_the_last_weights(tmp_path):
    whole, broken = Run(growing(), "divebatch", 0, tmp_path / "a"), Run(growing(), "divebatch", 0, tmp_path / "b")
    for run in (whole, broken):
        execute(run)
    previous(broken.checkpoint_path).replace(broken.checkpoint_path)  # all records, one epoch of weights missing
    execute(broken, resume=True)
    assert_same_end(broken, whole)


def test_a_complete_run_needs_no_checkpoint(tmp_path):
    run = Run(growing(), "divebatch", 0, tmp_path)
    execute(run)
    before = run.records_path.read_text()
    for damage in (lambda path: path.write_bytes(b"bad"), Path.unlink):
        for path in (run.checkpoint_path, previous(run.checkpoint_path)):
            damage(path)
        execute(run, resume=True)
        assert run.records_path.read_text() == before


@pytest.mark.parametrize(("most_bytes", "error"), [(100, RecordError), (5_000, CheckpointError)])
def test_a_full_disk_names_the_file_and_a_resume_goes_on(tmp_path, most_bytes, error):
    """The system refuses to let any file grow beyond the limit, in the middle of a write."""
    whole, broken = Run(growing(), "divebatch", 0, tmp_path / "a"), Run(growing(), "divebatch", 0, tmp_path / "b")
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
    return with_method(replace(growing(epochs=5), schedule=schedule), **method)


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


LIMIT = 60.0
"""Seconds until a command that hangs is given up."""
SWAPS = {
    "seed": (lambda run: replace(run, seed=1), r"seed is 1 there and 0 here"),
    "method": (lambda run: replace(run, method_name="oracle"), r"method\.\w+ is .* there and .* here"),
    "length": (lambda run: replace(run, experiment=replace(run.experiment, epochs=9)), r"epochs is 9 there and 4 here"),
    "precision": (
        lambda run: replace(run, experiment=run.experiment.with_training(precision="bf16")),
        r"training\.precision is 'bf16' there and 'fp32' here",
    ),
}


@pytest.mark.parametrize("swap", list(SWAPS))
def test_a_checkpoint_of_another_run_is_refused_and_the_error_names_what_differs(tmp_path, begun, swap):
    change, message = SWAPS[swap]
    other = replace(change(begun), folder=tmp_path / "other")
    kill_after(other, 2)
    shutil.copy(other.checkpoint_path, begun.checkpoint_path)
    before = begun.records_path.read_bytes()
    with pytest.raises(CheckpointError, match=f"belongs to another run: {message}"):
        execute(begun, resume=True)
    assert begun.records_path.read_bytes() == before


def test_a_checkpoint_of_other_data_of_the_same_size_is_refused(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        write_cifar10(tmp_path / name, per_file=4, seed=seed)
    run = Run(
        get_experiment("cifar10", ["model.kind=resnet20"]).scaled(3),
        "sgd-small",
        0,
        tmp_path / "runs",
        data_dir=tmp_path / "a",
    )
    kill_after(run, 1)
    with pytest.raises(CheckpointError, match=r"the fingerprint of the data is '.*' there and '.*' here"):
        execute(replace(run, data_dir=tmp_path / "b"), resume=True)
    execute(run, resume=True)
    assert len(read_run(run.records_path)[1]) == 3


def test_a_checkpoint_of_another_version_is_refused(begun, monkeypatch):
    monkeypatch.setattr(runs, "__version__", "9.9")
    with pytest.raises(CheckpointError, match=r"version of divebatch is '\d+\.\d+\.\d+' there and '9\.9' here"):
        execute(begun, resume=True)


def test_records_that_were_changed_are_noticed(begun):
    """Any digit of any line, in the header and in an epoch; what stands behind the checkpoint is written again."""
    lines = begun.records_path.read_text().splitlines(keepends=True)
    changes = {0: '"cpus": ', 1: '"train_loss": ', 2: '"train_seconds": '}
    for number, key in changes.items():
        at = lines[number].index(key) + len(key)
        digit = "1" if lines[number][at] != "1" else "2"
        changed = lines[number][:at] + digit + lines[number][at + 1 :]
        begun.records_path.write_text("".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises(CheckpointError, match=r"seed-0\.jsonl' was changed after its checkpoint .*seed-0\.ckpt'"):
            execute(begun, resume=True)
    begun.records_path.write_text("".join([*lines, lines[-1].replace('"epoch": 2', '"epoch": 3')]))
    execute(begun, resume=True)
    assert len(read_run(begun.records_path)[1]) == 4


# Another micro-batch


def test_another_micro_batch_continues_the_run_up_to_rounding(tmp_path, begun, caplog):
    """What the advice for a run that is out of memory says."""
    whole = replace(begun, folder=tmp_path / "whole")
    execute(whole)
    execute(replace(begun, experiment=begun.experiment.with_training(micro_batch_size=7)), resume=True)
    ours, theirs = read_run(begun.records_path), read_run(whole.records_path)
    assert [epoch.micro_batch_size for epoch in ours[1]] == [None, None, 7, 7]
    assert ours[0].config["training"]["micro_batch_size"] == 7
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert (one.batch_size, one.steps, one.samples) == (other.batch_size, other.steps, other.samples)
        assert [one.train_loss, one.val_loss, one.diversity] == pytest.approx(
            [other.train_loss, other.val_loss, other.diversity], rel=1e-4
        )
    assert not caplog.text


# What is gone


def test_records_without_their_checkpoint_are_kept(begun):
    for path in (begun.checkpoint_path, previous(begun.checkpoint_path)):
        path.unlink()
    before = begun.records_path.read_bytes()
    with pytest.raises(CheckpointError, match=r"holds 2 epochs, but its checkpoint 'seed-0\.ckpt' is gone"):
        execute(begun, resume=True)
    assert begun.records_path.read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, caplog):
    run, whole = (Run(small(), "divebatch", 0, tmp_path / name, checkpoint_every=3) for name in ("a", "b"))
    kill_after(run, 2)
    execute(run, resume=True)
    execute(whole)
    assert_same_end(run, whole)
    assert "no checkpoint of" in caplog.text


@pytest.mark.parametrize("resume", [True, False])
def test_a_checkpoint_without_its_records_is_kept(begun, resume):
    begun.records_path.unlink()
    with pytest.raises(RecordError, match=r"seed-0\.ckpt' is a checkpoint, but the records of its run"):
        execute(begun, resume=resume)
    assert begun.checkpoint_path.exists()


@pytest.mark.parametrize("change", ["unlinked", "replaced"])
def test_records_that_go_while_a_run_writes_end_it(tmp_path, change):
    run = Run(small(), "divebatch", 0, tmp_path)

    def meddle(record: Any) -> None:
        content = run.records_path.read_bytes()
        run.records_path.unlink()
        if change == "replaced":  # as `sed -i` and editors do
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(run.records_path)

    with pytest.raises(RecordError, match="was removed or replaced while its run was writing"):
        execute(run, on_epoch=meddle)


def test_a_report_does_not_wait_for_a_pipe(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run)
    os.mkfifo(run.records_path.with_name("seed-1.jsonl"))
    for words in (["report", str(tmp_path)], ["watch", "--once", str(tmp_path)]):
        assert "seed-1.jsonl': it is not a file" in CliRunner().invoke(app, words).output


# A longer run


def command(folder: Path, experiment: Experiment, *words: str) -> Any:
    (folder / "it.toml").write_text(to_toml(experiment))
    start = ["run", str(folder / "it.toml"), "--methods", "divebatch", "--trials", "1", "--jobs", "1", "--quiet"]
    return CliRunner().invoke(app, [*start, "--out", str(folder / "out"), *words])


def test_more_epochs_continue_a_run_with_its_settings_as_they_were(tmp_path):
    assert command(tmp_path, small()).exit_code == 0
    path = tmp_path / "out" / "synthetic-nonconvex" / "divebatch" / "seed-0.jsonl"
    before = path.read_text().splitlines()
    longer = command(tmp_path, small(), "--epochs", "6", "--resume")
    assert longer.exit_code == 0, longer.output
    after = path.read_text().splitlines()
    assert after[1:5] == before[1:]
    assert [json.loads(line)["epoch"] for line in after[1:]] == [1, 2, 3, 4, 5, 6]
    configs = [json.loads(lines[0])["config"] for lines in (before, after)]
    assert configs[1] == {**configs[0], "epochs": 6}
    shorter = command(tmp_path, small(), "--epochs", "3", "--resume")
    assert shorter.exit_code == 2
    assert "epochs is 6 there and 3 now" in shorter.output


def test_a_schedule_that_ended_is_not_continued(tmp_path):
    cosine = replace(small(), schedule=Part(kind="cosine", settings={"over_epochs": 4}))
    assert command(tmp_path, cosine).exit_code == 0
    longer = command(tmp_path, cosine, "--epochs", "6", "--resume")
    assert longer.exit_code == 2
    assert "planned for 4 epochs, where its cosine schedule ends" in longer.output


# Nobody listens


@pytest.mark.slow
@pytest.mark.parametrize(("output", "mode"), [("closed", []), ("full", ["--json"])])
def test_output_that_cannot_be_written_does_not_end_training(tmp_path, output, mode):
    (tmp_path / "it.toml").write_text(to_toml(small()))
    words = ["run", str(tmp_path / "it.toml"), "--methods", "divebatch", "--trials", "1", "--jobs", "1", *mode]
    command = [sys.executable, "-m", "divebatch", *words, "--out", str(tmp_path)]
    if output == "full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") if output == "full" else os.fdopen(write, "w") as stdout:
        answer = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "training continues" in answer.stderr
    assert "Traceback" not in answer.stderr
    (path,) = tmp_path.rglob("*.jsonl")
    assert len(read_run(path)[1]) == 4


@pytest.mark.slow
def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    execute(Run(small(), "divebatch", 0, tmp_path))
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    execute(Run(small(), "oracle", 0, tmp_path))
    write, written = Path.write_bytes, []

    def fill_up(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    answer = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert answer.exit_code == 1
    assert "No space left on device" in answer.output
    after = {path: path.read_bytes() for path in before}
    assert after == before
    assert not list(tmp_path.rglob("*.tmp"))


HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(small(), "divebatch", 0, tmp_path / "out")


def test_a_run_that_another_process_has_is_refused_and_a_killed_one_holds_nothing(run, tmp_path):
    """Its child lives on, as the processes of a DataLoader may."""
    lock = run.records_path.with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == holder.pid
        with pytest.raises(RecordError, match="another process is working on"):
            execute(run)
        assert not run.records_path.exists()
        execute(Run(small(), "divebatch", 1, run.folder))
        answer = command(tmp_path, small())
        assert answer.exit_code == 1
        assert "another process is working on" in answer.output
        holder.kill()
        holder.wait()
        execute(run)
        holder.stdout.close()
    assert_same_end(run, run)


def test_where_the_system_has_no_locks_it_says_so_and_goes_on(run, monkeypatch, caplog):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    execute(run)
    assert_same_end(run, run)
    assert "cannot lock" in caplog.text


def test_a_file_that_another_process_removes_is_opened_again(tmp_path, monkeypatch):
    path, lock, opened = tmp_path / "it.lock", fcntl.lockf, []

    def late(file, *settings):
        opened.append(file)
        if len(opened) == 1:
            path.unlink()
        lock(file, *settings)

    monkeypatch.setattr(fcntl, "lockf", late)
    with locked(path) as is_ours:
        assert is_ours
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(opened[1].fileno()), path.stat())
