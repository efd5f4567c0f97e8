"""Ranks that are killed, stopped or late: the others end in bounded time and say which one it was."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from divebatch.__main__ import main
from divebatch.lab import ranks
from lab import failing_command
from lab.rank_processes import Job, launch

pytestmark = pytest.mark.slow
WORDS = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--trials", "1", "--epochs", "4", "--quiet"]
CAUSES = "killed, stopped, out of reach, or ended by an error of its own"


def command(words: list[str], changes: dict[str, str]) -> None:
    """`divebatch` with a rank that fails, and with less patience for it."""
    ranks.TIMEOUT, ranks.PATIENCE = 4.0, 2.0
    failing_command.make_fail(**changes)
    sys.argv = ["divebatch", *words]
    main()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(size: int, failure: str, rank: int, *words: str, by_hand: bool = False) -> Job:
        changes = {"FAILURE": failure, "FAILING_RANK": str(rank), "FAILING_STEP": "5"}
        arguments = [*WORDS, "--out", str(tmp_path / "out"), *words]
        jobs.append(launch(tmp_path / "log", size, command, arguments, changes, by_hand=by_hand))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def said(job: Job) -> list[str]:
    """What the ranks said, without who did and without what torch itself warns of."""
    found = re.findall(r"^divebatch: rank \d of \d(?:, [\w -]+)?: (.*)$", job.log.read_text(), flags=re.MULTILINE)
    assert "Traceback" not in job.log.read_text()
    return list(found)


def test_a_rank_that_is_stopped_is_named_after_the_time_limit(start):
    job = start(3, "SIGSTOP", 1)
    assert job.ends_of(0, 2) == [1, 1]
    assert f"no answer from rank 1: {CAUSES}" in said(job)


@pytest.mark.parametrize("failure", ["SIGKILL", "SIGSTOP"])
def test_without_a_launcher_the_loss_of_rank_0_is_told_by_all_others(start, failure):
    """It takes the store with it, through which ranks answer each other."""
    job = start(3, failure, 0, by_hand=True)
    assert job.ends_of(1, 2) == [1, 1]
    assert said(job) == [f"no answer from rank 0: {CAUSES}"] * 2


def test_the_loss_of_another_rank_is_told_by_rank_0(start):
    job = start(2, "SIGKILL", 1, "--sharding", "fsdp", by_hand=True)
    assert job.ends_of(0, 1) == [1, -signal.SIGKILL]
    assert said(job) == [f"no answer from rank 1: {CAUSES}"]


def command_of_some(words: list[str], come: list[str]) -> None:
    command(words, {}) if os.environ["RANK"] in come else time.sleep(1000.0)


def test_a_start_that_not_all_ranks_join_ends(tmp_path):
    words = [*WORDS, "--out", str(tmp_path / "out")]
    job = launch(tmp_path / "log", 2, command_of_some, words, ["1"], by_hand=True)
    try:
        assert job.ends_of(1) == [1]
        assert "cannot join the others" in job.log.read_text()
        assert not Path(tmp_path / "out").exists()
    finally:
        job.kill()
