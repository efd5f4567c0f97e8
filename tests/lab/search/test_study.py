import shutil
import sys
import threading
from collections import Counter

import pytest

from divebatch.errors import ArgumentError, MissingExtraError
from divebatch.lab.search import Study, parse_space
from divebatch.lab.search.storage import open_storage, require_optuna, sqlite_url

GRID = parse_space(["lr=1,2", "batch_size=8,16,32"])
RANGE = parse_space(["lr=0.1..1.0", "batch_size=8..64"])


TIMEOUT = 60.0


class Clock:
    """Of all processes of a test, moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_timeout(self) -> None:
        self.now += TIMEOUT + 1


clock = Clock()


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database with its tables, which take Optuna a while."""
    path = tmp_path_factory.mktemp("empty") / "study.db"
    open_storage(sqlite_url(path))
    return path


@pytest.fixture(autouse=True)
def _begin_with_tables(empty, tmp_path):
    shutil.copy(empty, tmp_path / "study.db")


def make_study(folder, space=GRID, **settings) -> Study:
    return Study(sqlite_url(folder / "study.db"), "study", space, heartbeat_timeout=TIMEOUT, clock=clock, **settings)


def finish_all(study: Study) -> list[dict]:
    points = []
    while (claim := study.claim()) is not None:
        points.append(claim.point)
        assert study.tell(claim.trial_id, 0.5)
    return points


def states(study: Study) -> Counter:
    return Counter(trial.state.name for trial in study.trials())


def test_a_grid_gives_every_point_once(tmp_path):
    study = make_study(tmp_path)
    assert finish_all(study) == list(GRID.points())
    assert states(study) == {"COMPLETE": 6}
    assert finish_all(make_study(tmp_path)) == []
    assert study.completed()[1].params == {"lr": 1, "batch_size": 16}


def test_processes_that_claim_at_the_same_moment_get_different_trials(tmp_path):
    """Threads with connections of their own stand for processes: SQLite tells them apart no better."""
    grid = parse_space(["lr=" + ",".join(map(str, range(1, 13)))])
    make_study(tmp_path, grid)
    claimed: list[int] = []
    together = threading.Barrier(3)

    def work() -> None:
        study = make_study(tmp_path, grid)
        together.wait()
        while (claim := study.claim()) is not None:
            claimed.append(claim.point["lr"])
            study.tell(claim.trial_id, 0.5)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 13))


def test_a_trial_is_begun_by_one_of_those_who_saw_it_waiting(tmp_path):
    """The very step, with all readers held back until everyone has read."""
    study = make_study(tmp_path)
    study._queue_a_missing_point()
    trial_id = study._id_of(0)
    others = [make_study(tmp_path) for _ in range(4)]
    together, begun = threading.Barrier(4), []

    def begin(other: Study) -> None:
        together.wait()
        begun.append(other._begin(trial_id))

    threads = [threading.Thread(target=begin, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [False, False, False, True]


def test_what_another_has_begun_since_we_looked_is_passed_over(tmp_path, monkeypatch):
    slow, quick = make_study(tmp_path), make_study(tmp_path)
    for point in list(GRID.points())[:2]:
        quick._study.enqueue_trial(point, user_attrs={"point": point})
    seen = slow.trials()
    taken = quick.claim()
    monkeypatch.setattr(slow, "trials", lambda: seen)
    assert slow._claim_waiting().number == taken.number + 1


def test_sqlite_transactions_exclude_each_other_from_their_first_read(tmp_path, monkeypatch):
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    monkeypatch.setattr("divebatch.lab.search.storage.PATIENCE_SECONDS", 0)
    url = sqlite_url(tmp_path / "study.db")
    first, second = open_storage(url).engine, open_storage(url).engine
    with first.connect() as reader, second.connect() as other:
        reader.execute(text("select 1"))
        with pytest.raises(OperationalError, match="locked"):
            other.execute(text("select 1"))


def test_a_silent_trial_is_run_again_and_its_late_result_refused(tmp_path):
    silent, other = make_study(tmp_path), make_study(tmp_path)
    lost = silent.claim()
    points = [lost.point, *finish_all(other)]
    assert sorted(map(str, points)) == sorted(map(str, GRID.points()))
    clock.pass_timeout()
    assert finish_all(other) == [lost.point]
    assert not silent.tell(lost.trial_id, 0.9)
    assert states(other) == {"COMPLETE": 6, "FAIL": 1}
    assert all(trial.value == 0.5 for trial in other.completed())


def test_a_trial_with_a_heartbeat_is_left_alone_however_long_it_takes(tmp_path):
    slow, other = make_study(tmp_path), make_study(tmp_path)
    claim = slow.claim()
    finish_all(other)
    for count in range(1, 4):
        slow.beat(claim.trial_id, count)
        clock.pass_timeout()
        assert other.claim() is None
    assert slow.tell(claim.trial_id, 0.9)


def test_a_process_that_died_before_its_first_heartbeat_is_found_too(tmp_path):
    dead, other = make_study(tmp_path), make_study(tmp_path)
    dead._queue_a_missing_point()
    assert dead._begin(dead._id_of(0))  # and no beat
    finish_all(other)
    clock.pass_timeout()
    finish_all(other)
    assert states(other) == {"COMPLETE": 6, "FAIL": 1}


def test_a_grid_that_was_queued_in_part_or_twice_is_run_once(tmp_path):
    first, second = make_study(tmp_path), make_study(tmp_path)
    for point in list(GRID.points())[:3]:
        for _ in range(2):  # two processes that looked at the same moment
            first._study.enqueue_trial(point, user_attrs={"point": point})
    points = finish_all(second)
    assert sorted(map(str, points)) == sorted(map(str, GRID.points()))
    assert states(second) == {"COMPLETE": 6, "FAIL": 3}


def test_two_that_start_together_hardly_queue_a_point_twice(tmp_path):
    studies = [make_study(tmp_path), make_study(tmp_path)]
    claims = [studies[turn % 2].claim() for turn in range(6)]
    assert {str(claim.point) for claim in claims} == set(map(str, GRID.points()))
    assert [study.claim() for study in studies] == [None, None]
    assert states(studies[0]) == {"RUNNING": 6}


def test_who_finds_the_waiting_trial_taken_looks_again(tmp_path, monkeypatch):
    study = make_study(tmp_path)
    claim_waiting, looks = study._claim_waiting, []

    def taken_at_first():
        looks.append(None)
        return claim_waiting() if len(looks) > 1 else None

    monkeypatch.setattr(study, "_claim_waiting", taken_at_first)
    assert study.claim().point == next(GRID.points())


def test_a_point_given_back_is_let_go_where_another_has_filled_its_place(tmp_path):
    study = make_study(tmp_path, RANGE, sampler="random", num_trials=1)
    study.give_back(study.claim().trial_id, "stopped")
    assert len(study._missing(study.trials())) == 1
    study._claim_sampled()
    assert study._missing(study.trials()) == []


def test_what_failed_for_good_is_not_tried_again_and_what_was_given_back_is(tmp_path):
    study = make_study(tmp_path)
    bad, stopped = study.claim(), study.claim()
    study.fail(bad.trial_id, "too large")
    study.give_back(stopped.trial_id, "stopped")
    points = finish_all(study)
    assert bad.point not in points
    assert points.count(stopped.point) == 1
    assert [trial.user_attrs["error"] for trial in study.failed()] == ["too large"]
    assert len(study.completed()) == 5


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_samplers_stay_in_their_ranges_and_end(tmp_path, sampler):
    study = make_study(tmp_path, RANGE, sampler=sampler, num_trials=6)
    points = finish_all(study)
    assert len(points) == 6
    assert all(0.1 <= point["lr"] <= 1.0 and 8 <= point["batch_size"] <= 64 for point in points)
    assert all(isinstance(point["batch_size"], int) for point in points)
    assert len({str(point) for point in points}) > 1


def test_a_sampled_trial_of_a_dead_process_is_run_again_and_the_number_kept(tmp_path):
    dead = make_study(tmp_path, RANGE, sampler="random", num_trials=4)
    other = make_study(tmp_path, RANGE, sampler="random", num_trials=4)
    lost = dead.claim()
    finish_all(other)
    clock.pass_timeout()
    assert finish_all(other) == [lost.point]
    assert states(other) == {"COMPLETE": 4, "FAIL": 1}


def test_of_too_many_sampled_at_once_the_last_is_dropped(tmp_path):
    study = make_study(tmp_path, RANGE, sampler="random", num_trials=2)
    claims = [study._claim_sampled() for _ in range(2)]
    study._study.ask()  # a process that counted before both
    surplus = study.trials()[-1]
    late = type(claims[0])(study._id_of(surplus.number), surplus.number, {"lr": 0.5, "batch_size": 8}, False)
    assert [study._is_ours_to_run(claim) for claim in (*claims, late)] == [True, True, False]


def test_a_study_keeps_to_what_it_was_begun_with(tmp_path):
    make_study(tmp_path).agree_on({"epochs": 3, "seeds": (0, 1)})
    make_study(tmp_path).agree_on({"epochs": 3, "seeds": (0, 1)})
    with pytest.raises(ArgumentError, match=r"begun with another epochs: 3, not 4. Choose another study_name"):
        make_study(tmp_path).agree_on({"epochs": 4, "seeds": (0, 1)})


@pytest.mark.parametrize(
    ("space", "settings", "message"),
    [
        (GRID, {"sampler": "dice"}, "unknown sampler 'dice'; known: grid, random, tpe"),
        (RANGE, {}, r"not a range: lr=0.1..1.0"),
        (GRID, {"num_trials": 3}, "as many trials as points"),
        (RANGE, {"sampler": "tpe"}, "need a number of trials"),
    ],
)
def test_wrong_use_is_said(tmp_path, space, settings, message):
    with pytest.raises(ArgumentError, match=message):
        make_study(tmp_path, space, **settings)


def test_a_database_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("divebatch.lab.search.storage.ATTEMPTS", 1)
    with pytest.raises(ArgumentError, match=r"no/such/folder.*unable to open"):
        open_storage(sqlite_url(tmp_path / "no/such/folder/study.db"))


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"divebatch\[search\]"):
        require_optuna()
