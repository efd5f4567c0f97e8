"""Searches: what is searched over, by several processes, and what comes out."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

import divebatch.lab.search as search_module
from divebatch.cli.search import cells, draw
from divebatch.errors import ArgumentError, RecordError, StoppedError
from divebatch.lab import experiment_names, get_experiment, parse_experiment
from divebatch.lab.schema import Part
from divebatch.lab.search import (
    Range,
    Results,
    Search,
    Tried,
    default_space,
    in_words,
    parse_space,
    points_of,
    to_toml,
    with_point,
    work,
    write_best,
)
from divebatch.records import Metric, read_run
from lab.helpers import tiny_search

CONVEX = get_experiment("synthetic-convex")
LOSS = Metric(name="val_loss", better="lower")


def finish(search: Search) -> list[Tried]:
    tried: list[Tried] = []
    work(search, on_result=tried.append)
    return tried


# What is searched over


def test_the_papers_grids_have_forty_and_twelve_points():
    rates = points_of(default_space(CONVEX, CONVEX.method("sgd-small")))
    assert len(rates) == 40
    assert (rates[0], rates[-1]) == ({"lr": 0.001, "batch_size": 32}, {"lr": 16.0, "batch_size": 512})
    sizes = points_of(default_space(CONVEX, CONVEX.method("divebatch")))
    assert len(sizes) == 12
    assert sizes[-1] == {"delta": 1.0, "max_batch_size": 8192}


def test_with_another_optimizer_the_grid_is_around_the_methods_own_settings():
    language = get_experiment("lm-bytes")
    method = language.method("fixed-16")
    points = points_of(default_space(language, method))
    assert {point["batch_size"] for point in points} == {8, 16, 32}
    assert {point["lr"] / method.lr for point in points} == {0.25, 0.5, 1.0, 2.0, 4.0}


def test_values_and_ranges_are_told_apart():
    texts = ["lr=0.001..16", "batch_size=32,64"]
    assert parse_space(texts) == {"lr": Range(0.001, 16), "batch_size": (32, 64)}
    assert in_words(parse_space(texts)) == texts


@pytest.mark.parametrize("text", ["lr", "lr=1,,2", "lr=nan", "lr=2..1", "lr=0..1", "=1"])
def test_a_text_that_cannot_be_read_is_shown(text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        parse_space([text])


def test_a_point_goes_to_the_method_or_its_policy():
    method = with_point(CONVEX.method("divebatch"), {"lr": 2.0, "delta": 0.5, "max_batch_size": 2048})
    assert (method.lr, method.batch_size) == (2.0, 128)
    assert method.policy.settings == {"delta": 0.5, "max_batch_size": 2048}


@pytest.mark.parametrize(
    ("method", "point", "message"),
    [
        ("sgd-small", {"delta": 1.0}, "called 'delta'; known: lr, batch_size, warmup_epochs"),
        ("divebatch", {"colour": 1.0}, "called 'colour'; known: .*delta.*max_batch_size"),
        ("divebatch", {"max_batch_size": 64}, "64"),
        ("sgd-small", {"lr": -1.0}, "lr: must be greater than 0"),
    ],
)
def test_points_that_cannot_be_run_are_found_before_any_work(method, point, message):
    with pytest.raises(ArgumentError, match=message):
        with_point(CONVEX.method(method), point)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "dice"}, "unknown sampler 'dice'"),
        ({"over": ("lr=1..2",)}, "a grid needs values, not a range"),
        ({"num_trials": 3}, "other samplers need a number"),
        ({"sampler": "tpe"}, "other samplers need a number"),
        ({"held_out": 1.5}, "held_out must lie between 0 and 1"),
        ({"study_name": "../up"}, "study_name"),
        ({"over": ("lr=-1,1",)}, "lr: must be greater than 0"),
    ],
)
def test_wrong_settings_are_named(tmp_path, settings, message):
    with pytest.raises(ArgumentError, match=message):
        tiny_search(tmp_path, **settings)


# Work


def test_a_search_trains_every_point_on_the_held_out_split(tmp_path):
    search = tiny_search(tmp_path, over=("lr=0.5,2.0", "batch_size=16"), num_seeds=2)
    tried = finish(search)
    assert [each.point for each in tried] == points_of(search.space)
    path = tmp_path / "synthetic-convex-sgd-small" / "sgd-small_lr-0.5_batch_size-16" / "seed-1.jsonl"
    header, epochs = read_run(path)
    assert header.config["held_out"] == 0.2
    assert (header.config["method"]["lr"], header.config["method"]["batch_size"]) == (0.5, 16)
    assert len(epochs) == 3
    assert epochs[-1].samples == 3 * 160  # four fifths of the 200 training samples
    other = read_run(path.with_name("seed-0.jsonl"))[1]
    assert tried[0].value == pytest.approx((epochs[-1].val_accuracy + other[-1].val_accuracy) / 2)
    assert finish(tiny_search(tmp_path, over=("lr=0.5,2.0", "batch_size=16"), num_seeds=2)) == []


def test_a_search_by_loss_looks_for_the_lowest(tmp_path):
    search = tiny_search(tmp_path, over=("lr=0.5,2.0",))
    search = replace(search, experiment=replace(search.experiment, metric=LOSS))
    finish(search)
    found = search.results()
    values = [each.value for each in found.tried]
    assert values == sorted(values)
    assert found.best == found.tried[0]
    assert read_run(search.runs(found.best.point)[0].records_path)[1][-1].val_loss == values[0]


@pytest.mark.parametrize("metric", [Metric(), LOSS], ids=lambda metric: metric.name)
@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_a_run_that_diverges_has_the_worst_value_and_the_search_goes_on(tmp_path, metric, sampler):
    optimizer = Part(kind="sgd", settings={"momentum": 0.99, "weight_decay": 0.5})
    trials = {} if sampler == "grid" else {"sampler": sampler, "num_trials": 12}
    search = tiny_search(tmp_path, over=("lr=1e38,1.0", "batch_size=32"), **trials)
    search = replace(search, experiment=replace(search.experiment, optimizer=optimizer, metric=metric))
    by_rate = {each.point["lr"]: each for each in finish(search)}
    assert by_rate.keys() == {1e38, 1.0}
    assert (by_rate[1e38].value, by_rate[1e38].note) == (metric.worst, "1 of 1 diverged")
    assert search.results().best.point["lr"] == 1.0


def test_a_point_that_cannot_be_run_fails_for_good(tmp_path):
    search = tiny_search(tmp_path, over=("lr=0.5,1.0",))
    place = search.runs({"lr": 0.5})[0].records_path
    place.parent.mkdir(parents=True)
    place.write_text('{"kind": "epoch"}\n')
    bad, good = finish(search)
    assert bad.value is None
    assert "is not a run record" in bad.note
    assert good.value is not None
    assert [each.value for each in search.results().tried] == [good.value, None]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampler_tries_as_many_points_as_it_is_told(tmp_path, sampler):
    over = ("lr=0.1..4.0", "batch_size=8..64", "warmup_epochs=0,1")
    search = tiny_search(tmp_path, over=over, sampler=sampler, num_trials=5, epochs=1)
    tried = finish(search)
    assert len(tried) == 5
    for each in tried:
        assert 0.1 <= each.point["lr"] <= 4.0
        assert 8 <= each.point["batch_size"] <= 64
        assert isinstance(each.point["batch_size"], int)
    told = [trial.value for trial in search._study.get_trials()]
    assert sorted(told) == sorted(each.value for each in tried)
    assert finish(tiny_search(tmp_path, over=over, sampler=sampler, num_trials=5, epochs=1)) == []
    assert len(finish(tiny_search(tmp_path, over=over, sampler=sampler, num_trials=7, epochs=1))) == 2


def test_a_stopped_search_continues_where_it_stood(tmp_path, monkeypatch):
    search, execute, epochs = tiny_search(tmp_path), search_module.execute, []

    def stop_after_two(run, *, on_epoch, **settings):
        def report(record):
            on_epoch(record)
            epochs.append(record.epoch)
            if len(epochs) == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        execute(run, on_epoch=report, **settings)

    monkeypatch.setattr(search_module, "execute", stop_after_two)
    with pytest.raises(StoppedError, match=r"batch_size.*stopped after 2 epochs"):
        finish(search)
    monkeypatch.setattr(search_module, "execute", execute)
    assert len(finish(search)) == 5
    assert len(search.results().tried) == 6


def test_another_search_of_the_same_name_is_refused(tmp_path):
    tiny_search(tmp_path).begin()
    tiny_search(tmp_path).begin()
    with pytest.raises(ArgumentError, match="has begun with another epochs: 3, not 2"):
        tiny_search(tmp_path, epochs=2).begin()


def test_a_result_that_cannot_be_read_is_named(tmp_path):
    search = tiny_search(tmp_path, over=("lr=0.5",))
    finish(search)
    path = search.runs({"lr": 0.5})[0].records_path.with_name("result.json")
    path.write_text("{")
    with pytest.raises(RecordError, match=r"result.json' cannot be read .*remove the file"):
        search.results()


WORKER = """
import json, os, signal, sys
from pathlib import Path
import divebatch.lab.search as module
from lab.helpers import tiny_search

folder, settings, dies = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "dies"
execute, begun = module.execute, []

def execute_and_die(run, *, on_epoch, **settings):
    begun.append(run)
    def report(record):
        with open(folder / "epochs.txt", "a") as file:
            file.write(f"{run.records_path} {record.epoch}\\n")
        if dies and len(begun) == 4 and record.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        on_epoch(record)
    execute(run, on_epoch=report, **settings)

module.execute = execute_and_die
search = tiny_search(folder, over=tuple(settings.pop("over")), **settings)
search.begin()
module.work(search, on_result=lambda tried: print(json.dumps(tried.point), flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_of_three_processes_one_is_killed_and_each_point_is_trained_once(tmp_path, sampler):
    settings = {"over": ["lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", "batch_size=8,32"]}
    if sampler != "grid":
        settings = {"over": ["lr=0.1..4.0"], "sampler": sampler, "num_trials": 16}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), json.dumps(settings), fate],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for fate in ("dies", "lives", "lives")
    ]
    outcomes = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, 0, 0], outcomes
    search = tiny_search(tmp_path, **{**settings, "over": tuple(settings["over"])})
    tried = search.results().tried
    assert len(tried) == len({json.dumps(each.point) for each in tried}) == 16
    assert all(each.value is not None for each in tried)
    said = Counter(line for out, _ in outcomes for line in out.decode().splitlines())
    assert set(said.values()) == {1}
    assert len(said) == 16
    epochs = Counter((tmp_path / "epochs.txt").read_text().splitlines())
    assert len(epochs) == 16 * 3
    assert sum(epochs.values()) - len(epochs) <= 1  # the epoch that the killed process had not saved, if any


def test_a_process_waits_for_points_of_others(tmp_path):
    search = tiny_search(tmp_path, over=("lr=0.5,2.0",))
    program = "import sys, pathlib; from divebatch.lab.files import locked\n"
    program += "with locked(pathlib.Path(sys.argv[1])) as held: print(held, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(search.runs({"lr": 0.5})[0].records_path.with_name(".lock"))]
    waited, tried = [], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"

        def on_wait(running):
            waited.append(running)
            other.kill()
            other.wait()

        work(search, on_result=tried.append, on_wait=on_wait)
    assert [each.point["lr"] for each in tried] == [2.0, 0.5]
    assert waited == [1]


# Results

RESULTS = Results(
    (
        Tried({"lr": 2.0, "batch_size": 32}, 0.9),
        Tried({"lr": 0.5, "batch_size": 16}, 0.8),
        Tried({"lr": 0.5, "batch_size": 64}, None, "too large"),
    ),
    6,
)


def test_the_best_point_becomes_a_file_that_runs_at_full_length(tmp_path):
    search = tiny_search(tmp_path)
    path = write_best(search, RESULTS, apply_to=["divebatch"])
    found = get_experiment(str(path))
    assert found.name == "synthetic-convex-tuned"
    assert found.epochs == search.experiment.epochs != search.epochs
    assert found.held_out == 0  # nothing any more
    for name in ("sgd-small", "divebatch"):
        assert (found.method(name).lr, found.method(name).batch_size) == (2.0, 32)
    assert found.method("oracle") == search.experiment.method("oracle")
    assert "90.00 % on held-out training data, 3 of 6 trials" in path.read_text().splitlines()[0]


def test_the_heat_map_has_a_cell_for_every_point(tmp_path):
    table = cells(tiny_search(tmp_path).space, RESULTS)
    assert (table[0][0], table[1][1], table[0][2]) == (80.0, 90.0, 0.0)
    assert [math.isnan(value) for row in table for value in row] == [False, True, False, True, False, True]


@pytest.mark.parametrize("metric", [Metric(), LOSS], ids=lambda metric: metric.name)
def test_pictures_are_pictures(tmp_path, metric):
    results = replace(RESULTS, metric=metric)
    for name, space in (
        ("grid", tiny_search(tmp_path).space),
        ("range", parse_space(["lr=0.1..4", "batch_size=8..64"])),
    ):
        drawing = draw(space, results, f"{name}-{metric.name}")
        with Image.open(io.BytesIO(drawing.png)) as image:
            assert image.width > 500
            assert len(image.convert("RGB").getcolors(10**6)) > 20
        assert ElementTree.fromstring(drawing.svg).tag.endswith("svg")


def test_a_loss_is_best_where_it_is_lowest_and_nothing_is_written_without_a_best(tmp_path):
    space = parse_space(["lr=1,2", "batch_size=8"])
    points = [({"lr": 1, "batch_size": 8}, 0.3), ({"lr": 1, "batch_size": 8}, 0.7), ({"lr": 2, "batch_size": 8}, None)]
    results = Results(tuple(Tried(*each) for each in points), 2, LOSS)
    assert cells(space, results) == [[0.3], [math.inf]]
    assert results.best == results.tried[0]
    nothing = Results((Tried({"lr": 2}, math.inf),), 2, LOSS)
    assert nothing.best is None
    assert write_best(tiny_search(tmp_path), nothing) is None


# Files


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_reads_back_equal(name):
    experiment = get_experiment(name)
    assert parse_experiment(tomllib.loads(to_toml(experiment)), "text") == experiment


def test_text_that_toml_treats_as_special_reads_back_equal():
    summary = 'quotes " and \\ and\nlines\tand \x7f and \x00 and ü and 😀'
    experiment = replace(CONVEX, summary=summary)
    text = to_toml(experiment, comment="first\nsecond")
    assert text.startswith("# first\n# second\n")
    assert parse_experiment(tomllib.loads(text), "text") == experiment
