"""Ranks that are killed, stopped or late: the others end in bounded time and say which one it was."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from divebatch.__main__ import main
from divebatch.errors import RankError
from divebatch.lab.training import roll_call
from divebatch.lab.training.launch import Place
from lab.experiments import failing_command
from lab.experiments.rank_processes import Job, launch

WORDS = ["run", "synthetic-nonconvex", "--methods", "divebatch", "--trials", "1", "--epochs", "4", "--quiet"]
LIMIT = ["--rank-timeout", "3"]
CAUSES = "killed, stopped, out of reach, or ended by an error of its own"


def command(words: list[str], changes: dict[str, str]) -> None:
    """`divebatch` with a rank that fails, and with less patience for it."""
    roll_call.BEAT, roll_call.PATIENCE = 0.1, 2.0
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
    job = start(3, "SIGSTOP", 1, *LIMIT)
    assert job.ends_of(0, 2) == [1, 1]
    assert said(job) == [f"rank 1 does not answer: {CAUSES}"]


def test_a_rank_that_is_late_is_named_after_the_time_limit(start):
    job = start(3, "sleep", 2, *LIMIT, "--sharding", "fsdp")
    assert job.ends_of(0, 1) == [1, 1]
    late = "rank 2 took longer than the ranks' time limit of 3 s for what the others have done"
    assert said(job) == [f"{late}. A larger --rank-timeout waits longer"]


@pytest.mark.parametrize("failure", ["SIGKILL", "SIGSTOP"])
def test_without_a_launcher_the_loss_of_rank_0_is_told_by_all_others(start, failure):
    """It takes the store with it, through which the others would agree on who says it."""
    job = start(3, failure, 0, *LIMIT, by_hand=True)
    assert job.ends_of(1, 2) == [1, 1]
    assert said(job) == [f"rank 0, which keeps the ranks' store, does not answer: {CAUSES}"] * 2


def test_without_a_launcher_the_loss_of_another_rank_is_told_by_rank_0(start):
    job = start(2, "SIGKILL", 1, by_hand=True)
    assert job.ends_of(0, 1) == [1, -signal.SIGKILL]
    assert said(job) == [f"rank 1 does not answer: {CAUSES}"]


# At the start


def command_of_some(words: list[str], come: list[str]) -> None:
    command(words, {}) if os.environ["RANK"] in come else time.sleep(1000.0)


@pytest.mark.parametrize(
    ("come", "by_hand", "message"),
    [
        ([0, 2], False, "ranks 1, 3 did not come within the ranks' time limit of 1 s. A larger --rank-timeout waits"),
        (
            [3],
            True,
            r"rank 0 does not answer at 127\.0\.0\.1:\d+ \(MASTER_ADDR, MASTER_PORT\) within .* was it started",
        ),
    ],
)
def test_ranks_that_do_not_come_are_named(tmp_path, come, by_hand, message):
    words = [*WORDS, "--out", str(tmp_path / "out"), "--rank-timeout", "1"]
    job = launch(tmp_path / "log", 4, command_of_some, words, [str(rank) for rank in come], by_hand=by_hand)
    try:
        assert job.ends_of(*come) == [1] * len(come)
        assert re.match(message, said(job)[0])
        assert not Path(tmp_path / "out").exists()
    finally:
        job.kill()


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = Place(0, 2, "127.0.0.1", port, launcher_keeps_store=False)
        with pytest.raises(
            RankError, match=rf"rank 0 of 2 cannot open the ranks' store at 127\.0\.0\.1:{port} .*EADDR"
        ):
            place.connect(1.0)
