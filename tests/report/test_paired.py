import math

import numpy as np
import pytest

from divebatch.report.paired import pair, t_cdf, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 29: 2.0452, 30: 2.0423}
"""Two-sided 95 % points as printed in tables of Student's t."""


@pytest.mark.parametrize(("degrees", "value"), TABLE.items())
def test_quantiles_are_those_of_printed_tables(degrees, value):
    assert t_quantile(0.975, degrees) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("degrees", [1, 2, 5, 8, 31])
def test_the_distribution_is_the_integral_of_its_density(degrees):
    """The slow twin: the density summed over fine steps."""
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    for value in (0.0, 0.3, 1.0, 2.5, 6.0):
        x = np.linspace(0.0, value, 20_001)
        density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        integral = float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        assert t_cdf(value, degrees) == pytest.approx(0.5 + integral, abs=1e-7)


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
