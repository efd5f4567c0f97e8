import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import divebatch.lab.search.worker as worker
from divebatch.errors import RecordError, StoppedError
from divebatch.lab.experiments.schema import Part
from divebatch.lab.search import Result, Study, collect, open_study, work
from divebatch.lab.search.worker import GivenUp, Heartbeat
from divebatch.records import Metric, read_run
from lab.search.tiny_search import OVER, tiny_plan

DIES = """
import os, signal, sys
from pathlib import Path
import divebatch.lab.search.worker as worker
from lab.search.tiny_search import tiny_plan

execute, begun = worker.execute, []

def execute_and_die(run, *, on_epoch, **settings):
    begun.append(run)
    def report(record):
        if len(begun) == 2 and record.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        on_epoch(record)
    execute(run, on_epoch=report, **settings)

worker.execute = execute_and_die
plan = tiny_plan(Path(sys.argv[1]))
worker.work(plan, worker.open_study(plan, heartbeat_timeout=1.0), on_result=print)
"""


def finish(plan, study: Study) -> list[Result]:
    results: list[Result] = []
    work(plan, study, on_result=results.append)
    return results


def test_a_search_trains_every_point_on_the_held_out_split(tmp_path):
    plan = tiny_plan(tmp_path, over=("lr=0.5,2.0", "batch_size=16"), num_seeds=2)
    results = finish(plan, open_study(plan))
    assert [result.point for result in results] == list(plan.space.points())
    path = tmp_path / "synthetic-convex-sgd-small" / "sgd-small_lr-0.5_batch_size-16" / "seed-1.jsonl"
    header, epochs = read_run(path)
    assert header.config["held_out"] == 0.2
    assert (header.config["method"]["lr"], header.config["method"]["batch_size"]) == (0.5, 16)
    assert len(epochs) == 3
    assert epochs[-1].samples == 3 * 160  # four fifths of the 200 training samples
    other = read_run(path.with_name("seed-0.jsonl"))[1]
    assert results[0].value == pytest.approx((epochs[-1].val_accuracy + other[-1].val_accuracy) / 2)
    assert finish(plan, open_study(plan)) == []


def test_a_search_by_loss_looks_for_the_lowest(tmp_path):
    loss = Metric(name="val_loss", better="lower")
    plan = tiny_plan(tmp_path, over=("lr=0.5,2.0",))
    plan = replace(plan, experiment=replace(plan.experiment, metric=loss))
    study = open_study(plan)
    work(plan, study, on_result=lambda result: None)
    found = collect(study)
    assert found.metric == loss
    values = [each.value for each in found.tried]
    assert values == sorted(values)
    assert found.best == found.tried[0]
    assert read_run(plan.runs(found.best.point)[0].records_path)[1][-1].val_loss == values[0]


def test_a_run_that_diverges_is_worth_nothing_and_the_search_goes_on(tmp_path):
    plan = tiny_plan(tmp_path, over=("lr=1e38,1.0", "batch_size=32"), num_seeds=1)
    experiment = plan.experiment
    optimizer = Part(kind="sgd", settings={"momentum": 0.99, "weight_decay": 0.5})
    plan = replace(plan, experiment=replace(experiment, optimizer=optimizer))
    bad, good = finish(plan, open_study(plan))
    assert (bad.value, bad.note) == (0.0, "1 of 1 diverged")
    assert good.value > 0
    assert collect(open_study(plan)).best.point == good.point


def test_a_trial_that_cannot_be_run_fails_for_good(tmp_path):
    plan = tiny_plan(tmp_path, over=("lr=0.5,1.0",))
    place = plan.runs({"lr": 0.5})[0].records_path
    place.parent.mkdir(parents=True)
    place.write_text('{"kind": "epoch"}\n')
    bad, good = finish(plan, open_study(plan))
    assert bad.value is None
    assert "is not a run record" in bad.note
    assert good.value is not None
    found = collect(open_study(plan))
    assert len(found.tried) == found.total
    assert [each.value for each in found.tried] == [good.value, None]


def test_a_stopped_search_gives_its_trial_back_and_goes_on_where_it_stood(tmp_path, monkeypatch):
    plan = tiny_plan(tmp_path)
    study = open_study(plan)
    execute, epochs = worker.execute, []

    def stop_after_two(run, *, on_epoch, **settings):
        def report(record):
            on_epoch(record)
            epochs.append(record.epoch)
            if len(epochs) == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        execute(run, on_epoch=report, **settings)

    monkeypatch.setattr(worker, "execute", stop_after_two)
    with pytest.raises(StoppedError, match="trial 1: stopped after 2 epochs"):
        finish(plan, study)
    assert [trial.user_attrs["again"] for trial in study.trials() if "again" in trial.user_attrs]
    monkeypatch.setattr(worker, "execute", execute)
    assert len(finish(plan, study)) == 5
    done = Counter(json.dumps(trial.user_attrs["point"]) for trial in study.completed())
    assert set(done.values()) == {1}
    assert len(done) == 6


def test_a_process_killed_in_a_trial_loses_nothing_and_nothing_is_done_twice(tmp_path):
    plan = tiny_plan(tmp_path)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    dying = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE
    )
    study = open_study(plan, heartbeat_timeout=1.0)
    while not study.completed():
        assert dying.poll() is None, dying.communicate()
        time.sleep(0.05)
    mine = finish(plan, study)
    printed = dying.communicate(timeout=60)[0].decode()
    assert dying.returncode == -signal.SIGKILL
    done = Counter(json.dumps(trial.user_attrs["point"]) for trial in study.completed())
    assert len(done) == len(list(plan.space.points())) == 6
    assert set(done.values()) == {1}
    assert len(mine) + printed.count("Result(") == 6
    assert [trial.user_attrs["again"] for trial in study.trials() if trial.state.name == "FAIL"] == ["its process died"]


def test_the_last_one_waits_for_others_and_takes_over_what_they_leave(tmp_path):
    plan = tiny_plan(tmp_path, over=("lr=0.5,2.0",))
    now, waited = [0.0], []
    lost = open_study(plan).claim()
    study = open_study(plan)
    study._clock = lambda: now[0]

    def on_wait(running: int) -> None:
        waited.append(running)
        now[0] += study.heartbeat_timeout / 2

    results: list[Result] = []
    work(plan, study, on_result=results.append, on_wait=on_wait)
    assert [result.point["lr"] for result in results] == [2.0, lost.point["lr"]]
    assert waited == [1, 1, 1]


def test_a_process_that_was_given_up_stops_when_it_wakes(tmp_path):
    plan = tiny_plan(tmp_path, over=OVER[:1])
    study = open_study(plan, heartbeat_timeout=0.06)
    claim = study.claim()
    with Heartbeat(study, claim.trial_id) as heartbeat:
        heartbeat.require_trust()
        study.give_back(claim.trial_id, "no heartbeat")
        ended = time.monotonic() + 20
        while heartbeat._is_trusted and time.monotonic() < ended:
            time.sleep(0.01)
        with pytest.raises(GivenUp):
            heartbeat.require_trust()


def test_a_heartbeat_changes_what_others_see(tmp_path):
    plan = tiny_plan(tmp_path, over=OVER[:1])
    study = open_study(plan, heartbeat_timeout=0.06)
    claim = study.claim()
    with Heartbeat(study, claim.trial_id):
        ended = time.monotonic() + 20
        while study.trials()[claim.number].user_attrs["beat"] < 2:
            assert time.monotonic() < ended
            time.sleep(0.01)


def test_a_database_that_goes_away_is_said(tmp_path):
    plan = tiny_plan(tmp_path)
    study = open_study(plan)
    study.storage.engine.dispose()
    (tmp_path / f"{plan.name}.db").unlink()
    (tmp_path / f"{plan.name}.db").mkdir()
    with pytest.raises(
        RecordError, match=r"the study's storage failed: .*unable to open.*or the disk full.* goes on later"
    ):
        finish(plan, study)
