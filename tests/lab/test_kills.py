"""Real processes that get real signals: what they leave behind, and what a resume makes of it."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from divebatch.cli import app
from divebatch.lab import Run, StopRequest, execute, get_experiment, load_checkpoint, workers
from divebatch.lab.runs import _Keeper
from divebatch.records import was_stopped
from lab.helpers import CPU, assert_same_end, records

PATIENCE = 60.0
"""Seconds until a wait for another process is given up."""
RUN = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--epochs", "8", "--trials", "1"]


def command_line(words: list[str], log: Path, nap: float) -> None:
    """What a new process does: `divebatch`, with a rest after each step where asked for."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    rest_after_steps(nap)
    workers._work = partial(work, workers._work, log)  # type: ignore[assignment]
    start, one_at_a_time = workers._Worker._start_process, threading.Lock()

    def alone(worker: Any) -> Any:
        with one_at_a_time:  # forked together, each would keep open what tells the other of the parent's end
            return start(worker)

    workers._Worker._start_process = alone  # type: ignore[method-assign]
    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: forks  # type: ignore[assignment, misc] # spawned workers import torch anew
    app(words)


def work(own: Callable[..., None], log: Path, *arguments: Any) -> None:
    """Note who works, then do what a worker of that process does."""
    with log.open("a") as output:
        output.write(f"worker {os.getpid()}\n")
    own(*arguments)


def rest_after_steps(nap: float) -> None:
    torch.set_num_threads(1)
    after_step = _Keeper._after_step

    def rested(saver: _Keeper) -> None:
        time.sleep(nap)
        after_step(saver)

    _Keeper._after_step = rested  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def forks() -> Any:
    """Makes processes that have imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["divebatch.cli", "torch._dynamo", "pytest", "typer.testing", "PIL.Image"])
    return context


@dataclass
class Life:
    """One process of one run."""

    run: Run
    process: Any
    log: Path

    def wait_for(self, event: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not event():
            is_hopeless = time.monotonic() > deadline or (self.process.exitcode or 0) > 0
            assert not is_hopeless, f"waited in vain: {self.log.read_text()}"
            time.sleep(0.002)

    def wait_for_saves(self, count: int) -> None:
        """Or for the end, if that comes first."""
        seen = {version(self.run.checkpoint_path)}

        def enough() -> bool:
            seen.add(version(self.run.checkpoint_path))
            return len(seen) > count or not self.process.is_alive()

        self.wait_for(enough)

    def end(self) -> int:
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "did not end"
        return int(self.process.exitcode)


def version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


@pytest.fixture
def born(tmp_path, forks) -> Iterator[Callable[..., Life]]:
    started = []

    def start(*words: str, nap: float = 0.0) -> Life:
        run = Run(get_experiment("synthetic-nonconvex").scaled(8), "divebatch", 0, tmp_path / "broken")
        log = tmp_path / f"log-{len(started)}"
        log.touch()
        arguments = [*RUN, "--jobs", "1", "--out", str(run.folder), *words]
        started.append(forks.Process(target=command_line, args=(arguments, log, nap)))
        started[-1].start()
        return Life(run, started[-1], log)

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    run = Run(get_experiment("synthetic-nonconvex").scaled(8), "divebatch", 0, tmp_path_factory.mktemp("whole"))
    execute(run)
    assert len({line["batch_size"] for line in records(run)}) > 2
    return run


def test_killed_at_a_random_instant_it_resumes_to_the_same_bits(born, whole):
    chance = random.Random(1)
    life = born("--resume", "--checkpoint-steps", "4", nap=0.002)
    life.wait_for_saves(chance.randint(0, 7))
    time.sleep(chance.uniform(0, 0.02))
    life.process.kill()
    assert life.end() == -signal.SIGKILL, life.log.read_text()
    last = born("--resume", "--checkpoint-steps", "4")
    assert last.end() == 0, last.log.read_text()
    assert_same_end(last.run, whole)


@pytest.mark.slow
def test_a_polite_signal_ends_a_run_that_resumes(born, whole):
    life = born(nap=0.005)
    life.wait_for_saves(2)
    life.process.terminate()
    assert life.end() == 1, life.log.read_text()
    assert "stopped after" in life.log.read_text()
    assert "--resume" in life.log.read_text()
    assert "Traceback" not in life.log.read_text()
    assert was_stopped(life.run.records_path)
    state = load_checkpoint(life.run.checkpoint_path, device=CPU)
    steps_in_epoch = (state["control"]["loader"]["pass"] or {"batches": 0})["batches"]
    assert state["control"]["epoch"] >= 2 or steps_in_epoch > 0
    again = born("--resume")
    assert again.end() == 0, again.log.read_text()
    assert_same_end(again.run, whole)
    assert not was_stopped(life.run.records_path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_two_jobs_stop_together_and_die_together(tmp_path, born):
    """SIGTERM to the parent; then, resumed, SIGKILL: no worker goes on writing, and both runs end in the same bits."""
    experiment = get_experiment("synthetic-nonconvex").scaled(8)
    runs = [Run(experiment, "sgd-small", seed, tmp_path / "broken") for seed in (0, 1)]
    words = ["--methods", "sgd-small", "--trials", "2", "--jobs", "2", "--checkpoint-steps", "5"]
    polite = born(*words, nap=0.02)
    polite.wait_for(lambda: all(run.checkpoint_path.exists() for run in runs))
    polite.process.terminate()
    assert polite.end() == 1, polite.log.read_text()
    assert "0 of 2 runs are complete; the same command with --resume" in polite.log.read_text()
    before = [version(run.checkpoint_path) for run in runs]
    rude = born(*words, "--resume", nap=0.02)
    rude.wait_for(lambda: not {version(run.checkpoint_path) for run in runs} & set(before))
    rude.process.kill()
    rude.end()
    assert len(workers_of(rude.log)) == 2
    rude.wait_for(lambda: not any(map(is_alive, workers_of(rude.log))))
    for run in runs:
        undisturbed = replace(run, folder=tmp_path / "whole")
        execute(run, resume=True)
        execute(undisturbed)
        assert_same_end(run, undisturbed)


# Workers that die


def workers_of(log: Path) -> list[int]:
    return [int(rest.split()[0]) for rest in log.read_text().split("worker ")[1:]]


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_its_own_run_with_it_alone(tmp_path, born):
    """The command ends, says which run failed, and a resume mends it."""
    words = ["--methods", "sgd-small", "--trials", "4", "--jobs", "2"]
    life = born(*words, nap=0.01)
    life.wait_for(lambda: life.log.read_text().count("worker ") == 2)
    life.wait_for(lambda: (tmp_path / "broken/synthetic-nonconvex/sgd-small/seed-0.ckpt").exists())
    os.kill(workers_of(life.log)[0], signal.SIGKILL)
    assert life.end() == 1, life.log.read_text()
    said = life.log.read_text()
    assert said.count("its process was killed by SIGKILL") == 1
    assert "sgd-small seed 0: its process was killed by SIGKILL" in said
    assert "--resume" in said
    assert "Traceback" not in said
    runs = [Run(get_experiment("synthetic-nonconvex").scaled(8), "sgd-small", k, tmp_path / "broken") for k in range(4)]
    assert [len(records(run)) for run in runs[1:]] == [8, 8, 8]
    again = born(*words, "--resume")
    assert again.end() == 0, again.log.read_text()
    undisturbed = replace(runs[0], folder=tmp_path / "whole")
    execute(undisturbed)
    assert_same_end(runs[0], undisturbed)


SIGNALS = [signal.SIGTERM, signal.SIGINT]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_stay():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_nothing_else_happens(number):
    with StopRequest() as stop:
        assert not stop.is_set
        send(number)
        assert stop.is_set


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequest() as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.is_set


def test_handlers_are_put_back_after_an_error():
    mine = []
    before = signal.signal(signal.SIGTERM, lambda *_: mine.append(1))
    try:
        with suppress(ZeroDivisionError), StopRequest():
            send(signal.SIGTERM)
            raise ZeroDivisionError
        assert not mine
        send(signal.SIGTERM)
        assert mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_listens_to_nothing_and_can_still_be_asked():
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.is_set)
            stop.is_set = True
            seen.append(stop.is_set)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]
