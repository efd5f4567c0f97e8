import re

import pytest

from divebatch.errors import ArgumentError
from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import paper_space, parse_space
from divebatch.lab.search.space import check_point, slug, with_point

CONVEX = get_experiment("synthetic-convex")


def test_the_papers_grids_have_forty_and_twelve_points():
    rates = list(paper_space(CONVEX.method("sgd-small")).points())
    assert len(rates) == 40
    assert rates[0] == {"lr": 0.001, "batch_size": 32}
    assert rates[-1] == {"lr": 16.0, "batch_size": 512}
    sizes = list(paper_space(CONVEX.method("divebatch")).points())
    assert len(sizes) == 12
    assert sizes[-1] == {"delta": 1.0, "max_batch_size": 8192}


def test_values_and_ranges_are_told_apart():
    space = parse_space(["lr=0.001..16", "batch_size=32,64"])
    assert space.dimensions[0].bounds == (0.001, 16)
    assert space.dimensions[1].values == (32, 64)
    assert not space.is_grid
    assert [str(each) for each in space.dimensions] == ["lr=0.001..16", "batch_size=32,64"]


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=a", "lr=1,,2", "lr=nan", "lr=2..1", "lr=0..1", "=1", "l r=1"])
def test_what_cannot_be_read_is_an_error_that_shows_it(text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        parse_space([text])


def test_a_setting_given_twice_is_an_error():
    with pytest.raises(ArgumentError, match="lr is searched over twice"):
        parse_space(["lr=1", "lr=2"])


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
        ("sgd-small", {"lr": -1.0}, "lr must be positive"),
    ],
)
def test_points_that_cannot_be_run_are_found_before_any_work(method, point, message):
    with pytest.raises(ArgumentError, match=message):
        check_point(CONVEX.method(method), point)


def test_different_points_have_different_folders():
    points = list(paper_space(CONVEX.method("sgd-small")).points())
    assert len({slug(point) for point in points}) == len(points)
    assert slug({"lr": 1e16}) == "lr-1e16"
