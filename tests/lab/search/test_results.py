import math
from xml.etree import ElementTree

import pytest
from PIL import Image

from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import Results, Tried, parse_space, write_results
from divebatch.lab.search.results import cells, draw
from divebatch.records import Metric
from lab.search.tiny_search import tiny_plan

RESULTS = Results(
    (
        Tried({"lr": 2.0, "batch_size": 32}, 0.9),
        Tried({"lr": 0.5, "batch_size": 16}, 0.8),
        Tried({"lr": 0.5, "batch_size": 64}, None, "too large"),
    ),
    6,
)


LOSS = Metric(name="val_loss", better="lower")


def pairs(results):
    return [(each.point, each.value) for each in results.tried]


def test_the_best_point_becomes_a_file_that_runs_at_full_length(tmp_path):
    plan = tiny_plan(tmp_path)
    paths = list(write_results(plan, RESULTS, apply_to=["divebatch"]))
    assert [path.suffix for path in paths] == [".toml", ".png", ".svg"]
    found = get_experiment(str(paths[0]))
    assert found.name == "synthetic-convex-tuned"
    assert found.epochs == plan.experiment.epochs != plan.epochs
    assert found.held_out == 0  # nothing any more
    for name in ("sgd-small", "divebatch"):
        assert (found.method(name).lr, found.method(name).batch_size) == (2.0, 32)
    assert found.method("oracle") == plan.experiment.method("oracle")
    assert "90.00 % on held-out training data, 3 of 6 trials" in paths[0].read_text().splitlines()[0]


def test_nothing_is_written_where_nothing_worked(tmp_path):
    plan = tiny_plan(tmp_path)
    assert list(write_results(plan, Results((), 6))) == []
    all_diverged = Results((Tried({"lr": 2.0, "batch_size": 32}, 0.0, "1 of 1 diverged"),), 6)
    assert list(write_results(plan, all_diverged)) == []
    assert not list(tmp_path.iterdir())


def test_the_heat_map_has_a_cell_for_every_point(tmp_path):
    space = tiny_plan(tmp_path).space
    table = cells(space, pairs(RESULTS), Metric())
    assert table[0][0] == 80.0
    assert table[1][1] == 90.0
    assert table[0][2] == 0.0
    assert [math.isnan(value) for row in table for value in row] == [False, True, False, True, False, True]


def test_of_a_third_dimension_the_best_is_shown(tmp_path):
    space = parse_space(["lr=1,2", "batch_size=8", "warmup_epochs=0,3"])
    results = [({"lr": 1, "batch_size": 8, "warmup_epochs": w}, a) for w, a in ((0, 0.2), (3, 0.6))]
    assert cells(space, results, Metric())[0][0] == 60.0


@pytest.mark.parametrize("metric", [Metric(), LOSS], ids=lambda metric: metric.name)
def test_pictures_are_pictures(tmp_path, metric):
    for name, space in (("grid", tiny_plan(tmp_path).space), ("range", parse_space(["lr=0.1..4", "batch_size=8..64"]))):
        png, svg = draw(space, pairs(RESULTS), tmp_path / f"{name}-{metric.name}", metric=metric)
        with Image.open(png) as image:
            assert image.width > 500
            assert len(image.convert("RGB").getcolors(10**6)) > 20
        texts = ElementTree.parse(svg).getroot().tag
        assert texts.endswith("svg")


def test_a_loss_is_best_where_it_is_lowest(tmp_path):
    space = parse_space(["lr=1,2", "batch_size=8"])
    results = [({"lr": 1, "batch_size": 8}, 0.7), ({"lr": 1, "batch_size": 8}, 0.3), ({"lr": 2, "batch_size": 8}, None)]
    assert cells(space, results, LOSS) == [[0.3], [math.inf]]
    tried = tuple(Tried(point, value) for point, value in results[1:])
    assert Results(tried, 2, LOSS).best == tried[0]
    assert Results((Tried({"lr": 2}, math.inf),), 2, LOSS).best is None


def test_one_dimension_has_no_heat_map(tmp_path):
    assert list(draw(parse_space(["lr=1,2"]), [({"lr": 1}, 0.5)], tmp_path / "one", metric=Metric())) == []
