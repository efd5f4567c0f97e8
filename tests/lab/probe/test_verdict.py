import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divebatch.lab.probe import Branch, Critical, Outcome, Probe
from divebatch.lab.probe.verdict import interval


def probe_of(losses, *, tolerance=0.02):
    """From {factor: loss of each repeat}, at batch size 10."""

    def outcome(factor, repeat, loss):
        size, rate = 10 * factor, math.sqrt(factor)
        return Outcome(Branch(factor=factor, batch_size=size, lr_factor=rate, steps=800 // size, repeat=repeat), loss)

    outcomes = [outcome(factor, *each) for factor, values in losses.items() for each in enumerate(values)]
    return Probe(10, 800, "sqrt", tolerance, tuple(outcomes))


def test_the_critical_batch_is_the_last_that_keeps_up():
    found = probe_of({1: [1.0, 2.0], 2: [1.0, 2.0], 4: [1.015, 2.03], 8: [1.2, 2.4], 16: [1.0, 2.0]})
    assert found.critical == Critical(size=40, low=40, high=40, is_open=False)  # 16 keeps up by chance: 8 did not
    assert str(found.critical) == "40 (surely 40, surely no more)"
    assert [gap.verdict for gap in found.gaps[1:]] == ["keeps up", "keeps up", "falls behind", "keeps up"]
    assert [gap.mean for gap in found.gaps] == pytest.approx([0, 0, 0.015, 0.2, 0])


def test_repeats_that_disagree_leave_it_open():
    found = probe_of({1: [1.0, 1.0], 2: [1.0, 1.03], 4: [1.0, 1.08], 8: [1.5, 1.52]})
    assert found.critical == Critical(size=20, low=10, high=40, is_open=False)
    assert [gap.verdict for gap in found.gaps[1:]] == ["perhaps keeps up", "perhaps falls behind", "falls behind"]
    assert str(found.critical) == "20 (surely 10, perhaps up to 40)"


def test_where_all_keep_up_the_end_is_open():
    found = probe_of({1: [1.0, 1.0], 2: [0.9, 0.91], 4: [0.8, 0.81]})
    assert str(found.critical) == "at least 40 (surely 40, no upper end found)"


def test_one_repeat_proves_nothing():
    found = probe_of({1: [1.0], 2: [1.0], 4: [2.0]})
    assert found.critical == Critical(size=20, low=10, high=None, is_open=False)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_branch_that_diverged_falls_behind(broken):
    found = probe_of({1: [1.0, 1.0], 2: [1.0, broken]})
    assert found.gaps[1].verdict == "falls behind"
    assert found.critical.size == 10


def test_a_negative_loss_is_compared_by_its_size():
    found = probe_of({1: [-1.0, -1.0], 2: [-0.9, -0.9], 4: [-1.1, -1.1]})
    assert [gap.mean for gap in found.gaps] == pytest.approx([0, 0.1, -0.1])


def test_the_interval_covers_its_mean_about_as_often_as_it_says():
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        _, low, high = interval([draw.gauss(1.0, 2.0) for _ in range(4)])
        hits += low <= 1.0 <= high
    assert 0.92 <= hits / 400 <= 0.98


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5), st.floats(0.001, 0.5))
def test_size_lies_between_low_and_high(losses, tolerance):
    found = probe_of({2**k: [loss, loss * 1.01, loss * 0.98] for k, loss in enumerate(losses)}, tolerance=tolerance)
    critical = found.critical
    assert critical.low <= critical.size
    assert critical.high is None or critical.size <= critical.high


def test_json_holds_all():
    values = json.loads(json.dumps(probe_of({1: [1.0, 1.0], 2: [1.0, 1.1]}).to_dict()))
    assert values["critical"]["size"] == 10
    assert len(values["branches"]) == 4
    assert values["gaps"][1]["verdict"] == "perhaps falls behind"
