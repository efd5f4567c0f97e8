"""The clock, with a time that moves only when told."""

from contextlib import suppress

import pytest
import torch

from divebatch.lab import Clock
from divebatch.lab import clock as module


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch) -> Time:
    made_up = Time()
    monkeypatch.setattr(module, "time", made_up)
    return made_up


def new_clock() -> Clock:
    return Clock(torch.device("cpu"))


def laps(clock: Clock) -> tuple[float, float, float, float]:
    return tuple(clock.seconds(name) for name in ("train", "measure", "evaluate", "compile"))  # type: ignore[return-value]


def test_a_lap_within_a_lap_pauses_the_outer_one(time):
    clock = new_clock()
    with clock.lap("train"):
        time.passes(1)
        with clock.lap("compile"):
            time.passes(10)
            with clock.lap("measure"):
                time.passes(100)
            time.passes(20)
        time.passes(2)
    time.passes(1000)
    with clock.lap("evaluate"):
        time.passes(5)
    assert laps(clock) == (3, 100, 5, 30)
    assert clock.train_seconds == 103
    assert clock.total_seconds == 1138


def test_a_lap_within_one_of_the_same_name_counts_once(time):
    clock = new_clock()
    with clock.lap("train"), clock.lap("train"):
        time.passes(2)
    assert clock.seconds("train") == 2


def test_a_lap_under_way_counts_already(time):
    clock = new_clock()
    with clock.lap("train"):
        time.passes(1)
        assert clock.seconds("train") == 1
        with clock.lap("measure"):
            time.passes(3)
            assert laps(clock) == (1, 3, 0, 0)
            assert clock.train_seconds == 4


def test_a_lap_that_fails_still_counts_and_ends(time):
    clock = new_clock()
    with suppress(ZeroDivisionError), clock.lap("train"), clock.lap("compile"):
        time.passes(4)
        raise ZeroDivisionError
    time.passes(7)
    assert laps(clock) == (0, 0, 0, 4)
    with clock.lap("train"):
        time.passes(1)
    assert laps(clock) == (1, 0, 0, 4)


def test_a_state_taken_within_a_lap_goes_on_within_a_lap(time):
    """As a checkpoint in the middle of an epoch does; the time between the two lives counts nowhere."""
    first = new_clock()
    time.passes(50)
    with first.lap("train"):
        time.passes(1)
        with first.lap("compile"):
            time.passes(10)
        time.passes(2)
        saved = first.state_dict()
        time.passes(4)
    assert first.seconds("train") == 7  # saving changes nothing
    time.passes(10_000)
    second = new_clock()
    time.passes(500)
    second.load_state_dict(saved)
    time.passes(20)
    with second.lap("train"):
        time.passes(4)
    assert laps(second) == (7, 0, 0, 10)
    assert second.total_seconds == 63 + 24


def test_a_state_loaded_within_a_lap_books_only_what_comes_after(time):
    saved = {"train": 5.0, "measure": 1.0, "evaluate": 2.0, "compile": 3.0, "total": 20.0}
    clock = new_clock()
    with clock.lap("train"):
        time.passes(100)
        clock.load_state_dict(saved)
        time.passes(1)
    assert laps(clock) == (6, 1, 2, 3)
    assert clock.total_seconds == 21
    assert clock.state_dict() == {**saved, "train": 6, "total": 21}


def test_what_has_no_name_is_refused(time):
    clock = new_clock()
    with pytest.raises(KeyError):
        clock.seconds("lunch")
