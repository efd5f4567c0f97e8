"""Commands on one folder at the same time: real processes, some of them killed."""

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import divebatch.cli.work.run as command
from divebatch.cli import app
from divebatch.errors import RecordError
from divebatch.lab.experiments import Failure, Run, get_experiment, locked_runs, runner
from divebatch.lab.experiments.run_lock import _locked, _open
from divebatch.lab.search import to_toml
from divebatch.ranks import Ranks
from lab.experiments.compare_runs import records
from lab.experiments.rank_processes import PATIENCE, Job, launch
from lab.experiments.small_experiment import small


@pytest.fixture
def run(tmp_path) -> Run:
    path = tmp_path / "small.toml"
    path.write_text(to_toml(replace(small(), name="small")), encoding="utf-8")
    return Run(get_experiment(str(path)), "divebatch", 0, tmp_path / "out")


def words(run: Run, *more: str) -> list[str]:
    experiment = str(run.folder.parent / "small.toml")
    chosen = ["--methods", "divebatch", "--trials", "1", "--jobs", "1"]
    return ["run", experiment, *chosen, "--out", str(run.folder), *more]


def call(run: Run, *more: str) -> Result:
    return CliRunner().invoke(app, words(run, *more))


def _command(arguments: list[str], gate: Path) -> None:
    """`divebatch`, whose training waits at the gate in its first step. A child of the process outlives it."""
    after_step, execute = runner.Saver._after_step, command.execute_all

    def waiting(saver: runner.Saver) -> None:
        (gate.parent / f"waits-{os.getpid()}").touch()
        while gate.exists():
            time.sleep(0.005)
        after_step(saver)

    def with_a_child(*runs: Any, **settings: Any) -> list[Failure]:
        """As DataLoaders have them."""
        if (child := os.fork()) == 0:
            time.sleep(PATIENCE)
            os._exit(0)
        with (gate.parent / "children").open("a") as file:
            file.write(f"{child}\n")
        return execute(*runs, **settings)

    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: forks  # type: ignore[assignment, misc] # spawned workers import torch anew
    runner.Saver._after_step = waiting  # type: ignore[method-assign]
    command.execute_all = with_a_child
    app(arguments)


@pytest.fixture
def held(tmp_path, run) -> Iterator[Callable[..., Job]]:
    """Start a command and come back when so many of its processes train; they go on when `gate` is gone."""
    jobs: list[Job] = []
    gate = tmp_path / "gate"
    gate.touch()

    def start(*more: str, size: int = 1, at_gate: int = 1) -> Job:
        jobs.append(launch(tmp_path / f"log-{len(jobs)}", size, _command, words(run, *more), gate))
        deadline = time.monotonic() + PATIENCE
        while len(list(tmp_path.glob("waits-*"))) < at_gate:
            assert time.monotonic() < deadline, jobs[-1].log.read_text()
            time.sleep(0.005)
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
    for child in children(tmp_path):
        os.kill(child, signal.SIGKILL)


def children(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "children").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_complete(run: Run) -> None:
    assert [epoch["epoch"] for epoch in records(run)] == [1, 2, 3, 4]
    assert [path.name for path in run.folder.iterdir()] == ["small"]


def test_a_second_command_fails_at_once_and_names_the_first(run, held, tmp_path):
    first = held()
    before = contents(run.folder)
    holder = f"process {first.processes[0].pid} on {socket.gethostname()} is working on small/divebatch/seed-0.jsonl"
    for more in ((), ("--resume",), ("--resume", "--trials", "2")):
        second = call(run, *more)
        assert second.exit_code == 2, second.output
        assert f"divebatch: '{run.folder}': {holder}" in second.output
        assert "Wait for its end, stop it, or choose another --out folder" in second.output
    assert contents(run.folder) == before
    (tmp_path / "gate").unlink()
    assert first.ends() == [0], first.log.read_text()
    assert_complete(run)


def test_other_runs_and_readers_have_the_folder_to_themselves_too(run, held, tmp_path):
    first = held()
    for more in (("--seed", "1"), ("--methods", "sgd-small", "--seed", "1")):
        other = call(run, *more)
        assert other.exit_code == 0, other.output
    assert (run.folder / ".lock").exists()  # still the first one's
    assert call(run).exit_code == 2
    for reader, *settings in (["report"], ["compare", "divebatch", "sgd-small"], ["watch", "--once"]):
        read = CliRunner().invoke(app, [reader, str(run.folder), *settings])
        assert read.exit_code == 0, read.output
    found = ["search", words(run)[1], "--over", "lr=0.1", "--epochs", "1", "--out", str(run.folder), "--quiet"]
    searched = CliRunner().invoke(app, found)
    assert searched.exit_code == 0, searched.output
    (tmp_path / "gate").unlink()
    assert first.ends() == [0], first.log.read_text()
    assert len(records(run)) == 4
    assert not (run.folder / ".lock").exists()


@pytest.mark.parametrize("more", [(), ("--trials", "2", "--jobs", "2")], ids=["alone", "with workers"])
def test_a_killed_command_holds_nothing_though_its_children_live(run, held, tmp_path, more):
    first = held(*more, at_gate=2 if more else 1)  # a worker that was still on its way would write before it ends
    assert call(run, "--resume").exit_code == 2
    first.kill()
    assert [os.kill(child, 0) for child in children(tmp_path)] == [None]
    assert (run.folder / ".lock").exists()
    again = call(run, "--resume", *more, "--jobs", "1")
    assert again.exit_code == 0, again.output
    assert_complete(run)


def test_ranks_hold_their_runs_together(run, held, tmp_path):
    first = held(size=2)
    second = launch(tmp_path / "second", 2, _command, words(run, "--resume"), tmp_path / "gate")
    assert second.ends() == [2, 2]
    told = second.log.read_text()
    assert told.count(f"process {first.processes[0].pid} on") == told.count("\n") == 1
    first.kill()
    (tmp_path / "gate").unlink()
    again = launch(tmp_path / "again", 2, _command, words(run, "--resume"), tmp_path / "gate")
    assert again.ends() == [0, 0], again.log.read_text()
    assert_complete(run)


def test_where_the_system_has_no_locks_it_says_so_once_and_goes_on(run, monkeypatch, caplog):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    assert call(run).exit_code == 0
    assert_complete(run)
    told = [record.getMessage() for record in caplog.records if "lock" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"the system cannot lock '{run.folder / '.lock'}' (No locks available)")


def test_a_file_that_another_command_clears_away_is_opened_again(tmp_path, monkeypatch):
    path, lock, opened = tmp_path / ".lock", fcntl.lockf, []

    def late(file, *settings):
        opened.append(file)
        if len(opened) == 1:
            path.unlink()
        lock(file, *settings)

    monkeypatch.setattr(fcntl, "lockf", late)
    with _open(path) as file:
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())


def test_a_folder_that_cannot_be_written_is_named(run):
    run.folder.mkdir()
    (run.folder / ".lock").mkdir()
    with pytest.raises(RecordError, match=r"cannot write '.*lock': Is a directory\. Choose another"):  # noqa: SIM117
        with locked_runs([run], Ranks.alone()):
            pass


def test_a_disk_that_is_full_at_the_first_write_is_named_and_blocks_nothing_later(run):
    """The system itself refuses every byte; the file can still be made."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        full = call(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.exit_code == 2
    said = f"divebatch: cannot write '{run.folder / '.lock'}': File too large. Choose another --out folder.\n"
    assert full.output == said
    assert not list(run.folder.iterdir())
    assert call(run).exit_code == 0
    assert_complete(run)


def test_more_runs_than_a_process_may_open_files_take_one_file(tmp_path):
    before = len(os.listdir("/dev/fd"))
    with _locked(tmp_path / ".lock", [f"run {number}" for number in range(2000)]):
        assert len(os.listdir("/dev/fd")) == before + 1
