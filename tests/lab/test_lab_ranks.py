"""Runs that several processes train together: the course of one process, safe from what befalls them."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from divebatch.__main__ import main
from divebatch.cli import app
from divebatch.lab import Run, execute, get_experiment, load_checkpoint, ranks
from lab import failing_command
from lab.data.image_files import write_cifar10
from lab.helpers import CPU, records
from lab.rank_processes import PATIENCE, Job, average_of_buffers, free_port, launch, runs_in, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_file=13)
    return folder


@pytest.fixture
def launched(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: Any, **settings: Any) -> Job:
        jobs.append(launch(tmp_path / f"log-{len(jobs)}", *arguments, **settings))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.fixture
def start(launched) -> Callable[..., Job]:
    return lambda size, *arguments: launched(size, train, *arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> Path:
    """Both experiments in one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = launch(folder / "log", 1, train, runs_in(folder, data_dir))
    assert job.ends() == [0], job.log.read_text()
    return folder


def assert_same_course(run: Run, other: Run) -> None:
    assert len(records(run)) == run.experiment.epochs
    for one, two in zip(records(run), records(other), strict=True):
        numbers = {key for key, value in two.items() if isinstance(value, float)} - ignored(run)
        assert {key: one[key] for key in numbers} == pytest.approx({key: two[key] for key in numbers}, rel=1e-9)
        for key in two.keys() - numbers - ignored(run) - {"reason"}:
            assert one[key] == two[key]


def ignored(run: Run) -> set[str]:
    """A model that is spread over ranks has its gradient nowhere other."""
    return {"exact_diversity", "micro_batch_size"} if run.sharding == "fsdp" else set()


def test_ranks_take_the_course_of_one_process(tmp_path, start, alone, data_dir):
    """DDP and FSDP2; of four ranks one needs two micro-batches for its part of 37 and the others one."""
    sharded = runs_in(tmp_path, data_dir, "fsdp")[0]
    sharded = replace(sharded, experiment=sharded.experiment.with_training(micro_batch_size=9))
    ours = [*runs_in(tmp_path, data_dir), sharded]
    job = start(4, ours)
    assert set(job.ends()) == {0}, job.log.read_text()
    for run, other in zip(ours, runs_in(alone, data_dir) * 2, strict=False):
        assert_same_course(run, other)
        header = json.loads(run.records_path.read_text().splitlines()[0])
        assert header["hardware"]["ranks"] == 4
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
    other = runs_in(alone, data_dir)[0]
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
    assert_same_course(run, other)
    before = samples_of_steps(first)[:done]
    after = samples_of_steps(second)[: -(-1003 // 37) - done]
    counts = Counter(feature for step in [*before, *after] for feature in step)
    assert len(counts) == 1003
    assert set(counts.values()) == {1}


def samples_of_steps(folder: Path) -> list[list[str]]:
    """Of each step what all ranks saw."""
    by_rank = [
        [line.split()[2:] for line in file.read_text().splitlines() if " step" in line] for file in folder.iterdir()
    ]
    return [[feature for share in shares for feature in share] for shares in zip(*by_rank, strict=False)]


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_loop.py"
WORDS = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--trials", "1", "--epochs", "4"]


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(get_experiment("synthetic-nonconvex").scaled(4), "divebatch", 0, tmp_path / "out")


@pytest.fixture
def command(launched, run) -> Callable[..., Job]:
    def start(*words: str, size: int = 2, **changes: str) -> Job:
        return launched(size, _command, [*WORDS, "--out", str(run.folder), *words], changes)

    return start


def _command(words: list[str], changes: dict[str, str]) -> None:
    failing_command.make_fail(**changes)
    sys.argv = ["divebatch", *words]
    main()


def sizes(run: Run) -> list[int]:
    return [epoch["batch_size"] for epoch in records(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    run = Run(get_experiment("synthetic-nonconvex").scaled(4), "divebatch", 0, tmp_path_factory.mktemp("whole"))
    execute(run)
    assert len(set(sizes(run))) > 2
    return run


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_one_process_resumes(command, run, whole):
    """torchrun hands SIGTERM on to each rank, and they get it in different steps; here one does at all."""
    job = command("--json", FAILURE="SIGTERM", FAILING_RANK="1", FAILING_STEP="41")
    assert job.ends() == [1, 1]
    printed = job.log.read_text()
    assert printed.count("divebatch: stopped after") == 1
    assert "torchrun --nproc-per-node 2 -m divebatch run" in printed
    assert printed.count('"epoch": 1,') == 1
    assert "Traceback" not in printed
    execute(run, resume=True)
    assert sizes(run) == sizes(whole)


def test_an_error_on_one_rank_ends_all_and_is_told(command, run):
    job = command("--quiet", size=3, FAILURE="error", FAILING_RANK="1", FAILING_STEP="5")
    assert all(code != 0 for code in job.ends())
    told = [line for line in job.log.read_text().splitlines() if line.startswith("divebatch:")]
    assert "divebatch: rank 1 of 3: the cat bit the cable" in told


def test_wrong_use_is_told_once(command, run):
    run.records_path.parent.mkdir(parents=True)
    run.records_path.write_text("")
    for words, message in {
        (): "already holds a run. Continue it with --resume",
        ("--sharding", "fsdp", "--log-exact"): "use sharding ddp",
    }.items():
        job = command(*words)
        assert job.ends() == [2, 2]
        assert job.log.read_text().count(message) == 1
        assert job.log.read_text().count("\n") == 1


def test_half_an_environment_of_a_launcher_is_named(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = CliRunner().invoke(app, [*WORDS, "--out", str(run.folder)])
    assert answer.exit_code == 1
    assert "Start the ranks with torchrun" in answer.output
    assert "RANK" in answer.output


def test_torchrun_starts_a_killed_job_anew_and_it_resumes_by_itself(tmp_path, run, whole):
    """A rank kills itself in the middle of the second epoch; nobody says --resume."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("--master-port", str(free_port()), failing_command.__file__, *WORDS),
        *("--out", str(run.folder), "--checkpoint-steps", "10", "--json"),
    ]
    steps = next(epoch["steps"] for epoch in records(whole)) + 15
    frailty = {"FAILURE": "SIGKILL", "FAILING_RANK": "1", "FAILING_STEP": str(steps), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, env={**os.environ, **frailty}, capture_output=True, text=True, timeout=3 * PATIENCE, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert sizes(run) == sizes(whole)
    assert re.findall(r'"epoch": (\d)', answer.stdout) == ["1", "2", "3", "4"]  # each once
    assert [path.name for path in run.folder.iterdir()] == ["synthetic-nonconvex"]


@pytest.mark.parametrize("words", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_the_example_of_the_docs_takes_one_course_on_two_ranks(tmp_path, words):
    courses = []
    for size in (1, 2):
        job = launch(tmp_path / f"log-{size}", size, _example, words)
        assert set(job.ends()) == {0}, job.log.read_text()
        courses.append(job.log.read_text())
    assert courses[0] == courses[1]
    assert "epoch 3 " in courses[0]


def _example(words: list[str]) -> None:
    sys.argv = [str(EXAMPLE), *words]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_docs_show_the_loop_of_the_example():
    shown = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), flags=re.DOTALL)
    lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    assert len(shown) == 1
    assert [line for line in shown[0].splitlines()[1:] if line.strip() not in lines] == []


CAUSES = "killed, stopped, out of reach, or ended by an error of its own"


def frail_command(words: list[str], changes: dict[str, str]) -> None:
    """`divebatch` with a rank that fails, and with less patience for it."""
    ranks.TIMEOUT, ranks.PATIENCE = 4.0, 2.0
    _command(words, changes)


@pytest.fixture
def frail(launched, run) -> Callable[..., Job]:
    def begin(size: int, failure: str, rank: int, *, by_hand: bool = False) -> Job:
        changes = {"FAILURE": failure, "FAILING_RANK": str(rank), "FAILING_STEP": "5"}
        words = [*WORDS, "--quiet", "--out", str(run.folder)]
        return launched(size, frail_command, words, changes, by_hand=by_hand)

    return begin


def said(job: Job) -> list[str]:
    """What the ranks said, without who did and without what torch itself warns of."""
    found = re.findall(r"^divebatch: rank \d of \d(?:, [\w -]+)?: (.*)$", job.log.read_text(), flags=re.MULTILINE)
    assert "Traceback" not in job.log.read_text()
    return list(found)


def test_a_rank_that_is_stopped_is_named_after_the_time_limit(frail):
    job = frail(3, "SIGSTOP", 1)
    assert job.ends_of(0, 2) == [1, 1]
    assert f"no answer from rank 1: {CAUSES}" in said(job)


@pytest.mark.parametrize("failure", ["SIGKILL", "SIGSTOP"])
def test_without_a_launcher_the_loss_of_rank_0_is_told_by_all_others(frail, failure):
    """It takes the store with it, through which ranks answer each other."""
    job = frail(3, failure, 0, by_hand=True)
    assert job.ends_of(1, 2) == [1, 1]
    assert said(job) == [f"no answer from rank 0: {CAUSES}"] * 2
