import math

import numpy as np
import pytest

from divebatch.report.paired import pair


def test_a_worked_example():
    """Five differences with mean 2 and standard deviation sqrt(2.5)."""
    found = pair([0.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.std, found.num_pairs) == (2.0, pytest.approx(math.sqrt(2.5)), 5)
    half = 2.7764 * math.sqrt(2.5) / math.sqrt(5)
    assert found.interval == (pytest.approx(2 - half, abs=1e-4), pytest.approx(2 + half, abs=1e-4))
    assert found.excludes_zero
    assert found.effect == pytest.approx(2 / math.sqrt(2.5) * 0.8)  # Hedges: 1 - 3 / (4 * 4 - 1)
    assert found.effect_in_words == "effect size 1.01, large; 5 seeds"


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    truth, held = 0.3, 0
    for _ in range(2000):
        low, high = pair(rng.normal(truth, 1.0, 4).tolist()).interval
        held += low <= truth <= high
    assert 0.935 < held / 2000 < 0.965


def test_two_pairs_have_a_wide_interval():
    found = pair([1.0, 2.0])
    assert found.interval == (pytest.approx(1.5 - 6.3531, abs=1e-3), pytest.approx(1.5 + 6.3531, abs=1e-3))
    assert not found.excludes_zero


def test_two_pairs_have_no_effect_size():
    """The correction for few pairs is zero there: it would call every difference negligible."""
    found = pair([1.0, 20.0])
    assert math.isnan(found.effect)
    assert found.effect_in_words == "too few for an effect size; 2 seeds"
    assert pair([1.0, 20.0, 11.0]).effect_in_words.startswith("effect size 0.64, medium")


def test_differences_without_spread():
    assert pair([0.0, 0.0]).effect == 0
    assert not pair([0.0, 0.0]).excludes_zero
    same = pair([0.1, 0.1, 0.1])
    assert same.effect == math.inf
    assert same.excludes_zero
    assert same.effect_in_words == "the same in every seed; 3 seeds"
