"""Runs that several processes train together: the same course as one process, and safe from what befalls them."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from divebatch.lab import Run, load_checkpoint
from lab.compare_runs import COSTS
from lab.data.image_files import write_cifar10
from lab.rank_processes import Job, average_of_buffers, launch, runs_in, train

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_file=13)
    return folder


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(size: int, *arguments: Any) -> Job:
        jobs.append(launch(tmp_path / f"log-{len(jobs)}", size, train, *arguments))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> Path:
    """Both experiments in one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = launch(folder / "log", 1, train, runs_in(folder, data_dir))
    assert job.ends() == [0], job.log.read_text()
    return folder


def epochs(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.records_path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in COSTS} for line in lines[1:]]


def assert_same_course(run: Run, other: Run) -> None:
    assert len(epochs(run)) == run.experiment.epochs
    for one, two in zip(epochs(run), epochs(other), strict=True):
        numbers = {key for key, value in two.items() if isinstance(value, float)} - ignored(run)
        assert {key: one[key] for key in numbers} == pytest.approx({key: two[key] for key in numbers}, rel=1e-9)
        for key in two.keys() - numbers - ignored(run) - {"reason"}:
            assert one[key] == two[key]


def ignored(run: Run) -> set[str]:
    """A model that is spread over ranks has its gradient nowhere whole."""
    return {"exact_diversity", "micro_batch_size"} if run.sharding == "fsdp" else set()


def test_the_course_of_one_process_is_worth_comparing(alone, data_dir):
    for run in runs_in(alone, data_dir):
        sizes = [epoch["batch_size"] for epoch in epochs(run)]
        assert len(set(sizes)) > 2, sizes
        assert all(epoch["measured"] and epoch["exact_diversity"] for epoch in epochs(run)), sizes


@pytest.mark.parametrize("size", [4])
def test_ranks_take_the_course_of_one_process(tmp_path, start, alone, data_dir, size):
    """DDP and FSDP2; of four ranks one needs two micro-batches for its part of 37 and the others one."""
    sharded = runs_in(tmp_path, data_dir, "fsdp")
    if size == 4:
        sharded = [replace(sharded[0], experiment=sharded[0].experiment.with_training(micro_batch_size=9))]
    ours = [*runs_in(tmp_path, data_dir), *sharded]
    job = start(size, ours)
    assert set(job.ends()) == {0}, job.log.read_text()
    for run, other in zip(ours, runs_in(alone, data_dir) * 2, strict=False):
        assert_same_course(run, other)
        header = json.loads(run.records_path.read_text().splitlines()[0])
        assert header["hardware"]["ranks"] == size
        assert header["hardware"]["sharding"] == run.sharding
    assert not job.log.read_text()


def test_buffers_become_their_mean_over_ranks(tmp_path):
    job = launch(tmp_path / "log", 3, average_of_buffers)
    assert job.ends() == [0, 0, 0], job.log.read_text()


def test_stopped_in_an_epoch_other_numbers_of_ranks_go_on(tmp_path, start, alone, data_dir):
    """FSDP on three, DDP on two, one process, FSDP on two: each is told to stop, by one rank only, and saves."""
    run, seen = runs_in(tmp_path, data_dir)[0], tmp_path / "seen"
    seen.mkdir()
    lives = [(3, "fsdp", {1: 10}), (2, "ddp", {0: 3}), (2, "fsdp", {1: 21})]
    for size, sharding, stop_after in lives:
        job = start(size, [replace(run, sharding=sharding, log_exact=False)], stop_after, seen)
        assert set(job.ends()) == {1}, job.log.read_text()
        assert "StoppedError: stopped after" in job.log.read_text()
        assert run.checkpoint_path.is_file()
    assert start(1, [replace(run, log_exact=False)], None, seen).ends() == [0]
    assert run.checkpoint_path.is_file()
    assert_same_course(replace(run, sharding="fsdp", log_exact=False), runs_in(alone, data_dir)[0])
    steps = [line.split()[2:] for file in seen.iterdir() for line in file.read_text().splitlines() if " step" in line]
    counts = Counter(feature for step in steps for feature in step)
    assert len(counts) == 1003
    assert set(counts.values()) == {run.experiment.epochs}
    assert load_checkpoint(run.checkpoint_path, device=CPU)["control"]["epoch"] == run.experiment.epochs


def test_a_rank_is_killed_and_fewer_go_on(tmp_path, start, alone, data_dir):
    """Every sample of the epoch that was cut short counts once: in the last checkpoint or after it."""
    whole = runs_in(alone, data_dir)[0]
    run = replace(runs_in(tmp_path, data_dir)[0], checkpoint_steps=2)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    ends = start(4, [run], None, first, (2, 12)).ends()
    assert ends[2] == -signal.SIGKILL
    assert all(code != 0 for code in ends), "a rank went on without the one that was killed"
    state = load_checkpoint(run.checkpoint_path, device=CPU)
    assert state["control"]["epoch"] == 0
    done = state["control"]["loader"]["pass"]["batches"]
    assert done == 10
    assert set(start(2, [run], None, second).ends()) == {0}
    assert_same_course(run, whole)
    before = samples_of_steps(first)[:done]
    after = samples_of_steps(second)[: -(-1003 // 37) - done]
    counts = Counter(feature for step in [*before, *after] for feature in step)
    assert len(counts) == 1003
    assert set(counts.values()) == {1}


def test_killed_while_saving_other_numbers_of_ranks_go_on(tmp_path, start, alone, data_dir):
    """Rank 0 leaves a file under the temporary name."""
    whole, left = runs_in(alone, data_dir)[0], []
    run = replace(runs_in(tmp_path, data_dir)[0], checkpoint_steps=2)
    complete, between = run.checkpoint_path.name, f"{run.checkpoint_path.name}.tmp"
    for size, moment in ((1, between), (2, between), (1, complete), (2, complete)):
        job = start(size, [run], None, None, (-1, 0), moment)
        assert job.ends()[0] == -signal.SIGKILL, job.log.read_text()
        left.append("".join(kind_of(run, suffix) for suffix in ("", ".previous", ".tmp")))
    assert left == ["-ff", "-ff", "fff", "fff"]  # the last checkpoint, the one before it, the new one
    assert start(1, [run]).ends() == [0]
    assert_same_course(run, whole)
    assert not list(run.folder.rglob("*.tmp"))


def kind_of(run: Run, suffix: str) -> str:
    path = run.checkpoint_path.with_name(run.checkpoint_path.name + suffix)
    return "f" if path.is_file() else "-"


def samples_of_steps(folder: Path) -> list[list[str]]:
    """Of each step what all ranks saw."""
    by_rank = [
        [line.split()[2:] for line in file.read_text().splitlines() if " step" in line] for file in folder.iterdir()
    ]
    return [[feature for share in shares for feature in share] for shares in zip(*by_rank, strict=False)]
