"""`divebatch run` under a launcher: what it prints, how it ends, and what torchrun makes of that."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from divebatch.__main__ import main
from divebatch.cli import app
from divebatch.lab import Run, execute, get_experiment
from divebatch.lab.runs import _Keeper
from lab import failing_command
from lab.compare_runs import records
from lab.rank_processes import PATIENCE, Job, free_port, launch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_loop.py"
pytestmark = pytest.mark.slow
WORDS = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--trials", "1", "--epochs", "4"]


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(get_experiment("synthetic-nonconvex").scaled(4), "divebatch", 0, tmp_path / "out")


@pytest.fixture
def command(tmp_path, run) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(*words: str, size: int = 2, **changes: str) -> Job:
        arguments = [*WORDS, "--out", str(run.folder), *words]
        jobs.append(launch(tmp_path / f"log-{len(jobs)}", size, _command, arguments, changes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


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
        ("--jobs", "2"): "--jobs 2: the 2 ranks train each run together",
        ("--sharding", "zero"): "unknown sharding 'zero'; known: ddp, fsdp",
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


def test_one_process_of_torchrun_resumes_by_itself_too(run, whole, monkeypatch):
    words = [*WORDS, "--out", str(run.folder), "--jobs", "1", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["divebatch", *words])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    with monkeypatch.context() as frail:
        frail.setattr(_Keeper, "_after_step", fail_in_the_second_epoch)
        answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert "the cat bit the cable" in answer.output
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert CliRunner().invoke(app, words).exit_code == 0
    assert sizes(run) == sizes(whole)
    assert [path.name for path in run.folder.iterdir()] == ["synthetic-nonconvex"]


def fail_in_the_second_epoch(saver: _Keeper) -> None:
    if saver.trainer.control.epoch == 1:
        raise ValueError("the cat bit the cable")


@pytest.mark.parametrize("words", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_the_example_of_the_docs_takes_one_course_on_two_ranks(tmp_path, words):
    courses = []
    for size in (1, 2):
        job = launch(tmp_path / f"log-{size}", size, _example, words)
        assert set(job.ends()) == {0}, job.log.read_text()
        courses.append(job.log.read_text())
    assert courses[0] == courses[1]
    assert "epoch 3:" in courses[0]


def _example(words: list[str]) -> None:
    sys.argv = [str(EXAMPLE), *words]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_docs_show_the_loop_of_the_example():
    shown = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), flags=re.DOTALL)
    lines = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    assert len(shown) == 1
    assert [line for line in shown[0].splitlines()[1:] if line.strip() not in lines] == []
