"""Two processes and one run: only one gets it, and a killed one holds nothing."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import RecordError
from divebatch.lab import Run, execute
from divebatch.lab.files import locked
from divebatch.lab.search import to_toml
from lab.compare_runs import assert_same_end
from lab.rank_processes import PATIENCE
from lab.small_experiment import small

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
        (tmp_path / "it.toml").write_text(to_toml(small()))
        words = ["run", str(tmp_path / "it.toml"), "--methods", "divebatch", "--trials", "1", "--jobs", "1"]
        answer = CliRunner().invoke(app, [*words, "--out", str(run.folder)])
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


def test_a_folder_that_cannot_be_written_is_named(run):
    run.folder.write_text("a file")
    with pytest.raises(RecordError, match=r"cannot write '.*lock': .* Choose another folder"):
        execute(run)


@pytest.mark.slow
def test_a_second_command_is_refused(run, tmp_path):
    """Real commands: the second fails while the first trains."""
    (tmp_path / "it.toml").write_text(to_toml(small().scaled(100_000)))
    words = ["run", str(tmp_path / "it.toml"), "--methods", "divebatch", "--trials", "1", "--jobs", "1"]
    words += ["--out", str(run.folder), "--resume"]
    with subprocess.Popen([sys.executable, "-m", "divebatch", *words], stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + PATIENCE
        while not run.checkpoint_path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        second = CliRunner().invoke(app, words)
        first.kill()
    assert second.exit_code == 1
    assert "another process is working on" in second.output
