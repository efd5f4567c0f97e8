import tomllib
from dataclasses import replace

import pytest

from divebatch.lab.experiments import experiment_names, get_experiment, parse_experiment
from divebatch.lab.experiments.schema import Part
from divebatch.lab.search import to_toml


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_reads_back_equal(name):
    experiment = get_experiment(name)
    assert parse_experiment(tomllib.loads(to_toml(experiment)), "text") == experiment


def test_text_that_toml_treats_as_special_reads_back_equal():
    summary = 'quotes " and \\ and\nlines\tand \x7f and \x00 and ü and 😀'
    experiment = replace(get_experiment("synthetic-convex"), summary=summary)
    text = to_toml(experiment, comment="first\nsecond")
    assert text.startswith("# first\n# second\n")
    assert parse_experiment(tomllib.loads(text), "text") == experiment


def test_shadows_read_back_equal():
    experiment = get_experiment("synthetic-convex")
    shadows = {"a tenth": Part(kind="noise-scale", settings={"max_batch_size": 64}), "b": Part(kind="fixed")}
    experiment = replace(experiment, methods={"m": replace(experiment.method("oracle"), shadows=shadows)})
    assert parse_experiment(tomllib.loads(to_toml(experiment)), "text") == experiment


def test_a_file_can_be_run_by_its_path(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(to_toml(replace(get_experiment("synthetic-convex"), name="own")), encoding="utf-8")
    assert get_experiment(str(path)).name == "own"
