"""A run's files belong together: whose a checkpoint is, what is gone, what was put in a file's place."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import CheckpointError, RecordError
from divebatch.lab import Run, execute, get_experiment, runs
from divebatch.lab.checkpoint import previous
from divebatch.lab.schema import Part
from divebatch.lab.search import to_toml
from divebatch.records import read_run
from lab.compare_runs import assert_same_end
from lab.data.image_files import write_cifar10
from lab.small_experiment import small

CIFAR10 = get_experiment("cifar10").with_model("resnet20")
LIMIT = 60.0
"""Seconds until a command that hangs is given up."""


def stop_after(run: Run, epochs: int) -> None:
    """Train so many epochs, and be killed."""

    def kill(record: Any) -> None:
        if record.epoch == epochs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(run, on_epoch=kill)


@pytest.fixture
def broken(tmp_path) -> Run:
    run = Run(small(), "divebatch", 0, tmp_path / "broken")
    stop_after(run, 2)
    return run


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
def test_a_checkpoint_of_another_run_is_refused_and_the_error_names_what_differs(tmp_path, broken, swap):
    change, message = SWAPS[swap]
    other = replace(change(broken), folder=tmp_path / "other")
    stop_after(other, 2)
    shutil.copy(other.checkpoint_path, broken.checkpoint_path)
    before = broken.records_path.read_bytes()
    with pytest.raises(CheckpointError, match=f"belongs to another run: {message}"):
        execute(broken, resume=True)
    assert broken.records_path.read_bytes() == before


def test_a_checkpoint_of_other_data_of_the_same_size_is_refused(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        write_cifar10(tmp_path / name, per_file=4, seed=seed)
    run = Run(CIFAR10.scaled(3), "sgd-small", 0, tmp_path / "runs", data_dir=tmp_path / "a")
    stop_after(run, 1)
    with pytest.raises(CheckpointError, match=r"the fingerprint of the data is '.*' there and '.*' here"):
        execute(replace(run, data_dir=tmp_path / "b"), resume=True)
    execute(run, resume=True)
    assert len(read_run(run.records_path)[1]) == 3


def test_a_checkpoint_of_another_version_is_refused(broken, monkeypatch):
    monkeypatch.setattr(runs, "__version__", "9.9")
    with pytest.raises(CheckpointError, match=r"version of divebatch is '\d+\.\d+\.\d+' there and '9\.9' here"):
        execute(broken, resume=True)


def test_records_that_were_changed_are_noticed(broken):
    """Any digit of any line, in the header and in an epoch; what stands behind the checkpoint is written again."""
    lines = broken.records_path.read_text().splitlines(keepends=True)
    changes = {0: '"cpus": ', 1: '"train_loss": ', 2: '"train_seconds": '}
    for number, key in changes.items():
        at = lines[number].index(key) + len(key)
        digit = "1" if lines[number][at] != "1" else "2"
        changed = lines[number][:at] + digit + lines[number][at + 1 :]
        broken.records_path.write_text("".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises(CheckpointError, match=r"seed-0\.jsonl' was changed after its checkpoint .*seed-0\.ckpt'"):
            execute(broken, resume=True)
    broken.records_path.write_text("".join([*lines, lines[-1].replace('"epoch": 2', '"epoch": 3')]))
    execute(broken, resume=True)
    assert len(read_run(broken.records_path)[1]) == 4


# Another micro-batch


def with_micro_batch(run: Run, size: int) -> Run:
    return replace(run, experiment=run.experiment.with_training(micro_batch_size=size))


def test_another_micro_batch_continues_the_run_up_to_rounding(tmp_path, broken, caplog):
    """What the advice for a run that is out of memory says."""
    whole = replace(broken, folder=tmp_path / "whole")
    execute(whole)
    execute(with_micro_batch(broken, 7), resume=True)
    ours, theirs = read_run(broken.records_path), read_run(whole.records_path)
    assert [epoch.micro_batch_size for epoch in ours[1]] == [None, None, 7, 7]
    assert ours[0].config["training"]["micro_batch_size"] == 7
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert (one.batch_size, one.steps, one.samples) == (other.batch_size, other.steps, other.samples)
        assert [one.train_loss, one.val_loss, one.diversity] == pytest.approx(
            [other.train_loss, other.val_loss, other.diversity], rel=1e-4
        )
    assert not caplog.text


def test_another_micro_batch_is_told_where_batch_norm_sees_it(tmp_path, caplog):
    write_cifar10(tmp_path / "data", per_file=4)
    run = Run(CIFAR10.scaled(2), "sgd-small", 0, tmp_path / "runs", data_dir=tmp_path / "data")
    stop_after(run, 1)
    execute(with_micro_batch(run, 8), resume=True)
    assert len(read_run(run.records_path)[1]) == 2
    assert f"'{run.records_path}' goes on with micro_batch_size=8 after None: BatchNorm takes its" in caplog.text


# What is gone


def test_records_without_their_checkpoint_are_kept(broken):
    for path in (broken.checkpoint_path, previous(broken.checkpoint_path)):
        path.unlink()
    before = broken.records_path.read_bytes()
    with pytest.raises(CheckpointError, match=r"holds 2 epochs, but its checkpoint 'seed-0\.ckpt' is gone"):
        execute(broken, resume=True)
    assert broken.records_path.read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, caplog):
    run, whole = (Run(small(), "divebatch", 0, tmp_path / name, checkpoint_every=3) for name in ("a", "b"))
    stop_after(run, 2)
    execute(run, resume=True)
    execute(whole)
    assert_same_end(run, whole)
    assert "no checkpoint of" in caplog.text


@pytest.mark.parametrize("resume", [True, False])
def test_a_checkpoint_without_its_records_is_kept(broken, resume):
    broken.records_path.unlink()
    with pytest.raises(RecordError, match=r"seed-0\.ckpt' is a checkpoint, but the records of its run"):
        execute(broken, resume=resume)
    assert broken.checkpoint_path.exists()


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


# What was put in a file's place


@pytest.mark.parametrize("suffix", [".jsonl", ".ckpt"])
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_pipe_or_a_link_in_a_file_s_place_is_refused_at_once(tmp_path, suffix, kind):
    run = Run(get_experiment("synthetic-nonconvex").scaled(2), "divebatch", 0, tmp_path)
    path = run.records_path.with_suffix(suffix)
    path.parent.mkdir(parents=True)
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(tmp_path / "elsewhere")
    words = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--epochs", "2", "--trials", "1", "--resume"]
    answer = CliRunner().invoke(app, [*words, "--jobs", "1", "--out", str(tmp_path)])
    assert answer.exit_code == 2
    assert "a pipe or a device" in answer.output


@pytest.mark.slow
def test_a_report_does_not_wait_for_a_pipe(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run)
    os.mkfifo(run.records_path.with_name("seed-1.jsonl"))
    for command in (["report", str(tmp_path)], ["watch", "--once", str(tmp_path)]):
        program = [sys.executable, "-m", "divebatch", *command]
        answer = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT, check=True)
        assert "seed-1.jsonl': it is not a file" in answer.stdout + answer.stderr


# A longer run


def test_more_epochs_continue_a_run_with_its_settings_as_they_were(tmp_path):
    text = to_toml(small())
    (tmp_path / "it.toml").write_text(text)
    words = ["run", str(tmp_path / "it.toml"), "--methods", "divebatch", "--trials", "1", "--quiet"]
    out = ["--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, [*words, "--epochs", "4", *out]).exit_code == 0
    path = tmp_path / "out" / "synthetic-nonconvex" / "divebatch" / "seed-0.jsonl"
    before = path.read_text().splitlines()
    longer = CliRunner().invoke(app, [*words, "--epochs", "6", "--resume", *out])
    assert longer.exit_code == 0, longer.output
    after = path.read_text().splitlines()
    assert after[1:5] == before[1:]
    assert [json.loads(line)["epoch"] for line in after[1:]] == [1, 2, 3, 4, 5, 6]
    configs = [json.loads(lines[0])["config"] for lines in (before, after)]
    assert configs[1] == {**configs[0], "epochs": 6}
    shorter = CliRunner().invoke(app, [*words, "--epochs", "3", "--resume", *out])
    assert shorter.exit_code == 2
    assert "epochs is 6 there and 3 now" in shorter.output


def test_a_schedule_that_ended_is_not_continued(tmp_path):
    cosine = replace(small(), schedule=Part(kind="cosine", settings={"over_epochs": 4}))
    (tmp_path / "it.toml").write_text(to_toml(cosine))
    words = ["run", str(tmp_path / "it.toml"), "--methods", "divebatch", "--trials", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    longer = CliRunner().invoke(app, [*words, "--epochs", "6", "--resume"])
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
    assert "training goes on" in answer.stderr
    assert "Traceback" not in answer.stderr
    (path,) = tmp_path.rglob("*.jsonl")
    assert len(read_run(path)[1]) == 4


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
