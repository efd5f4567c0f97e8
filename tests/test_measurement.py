"""Diversity, its intervals' quantiles, and the history that policies see."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divebatch import Decision, Diversity, Measurement
from divebatch.errors import DivebatchError, UndefinedDiversityError
from divebatch.measurement import History, _distribution, t_quantile

UNDEFINED = {
    "zero sum": (Diversity(3.0, 0.0, 10), "the gradients of 10 samples sum to zero"),
    "all zero": (Diversity(0.0, 0.0, 10), "the gradients of 10 samples sum to zero"),
    "NaN": (Diversity(math.nan, 1.0, 10), "nan"),
    "NaN beside a zero sum": (Diversity(math.nan, 0.0, 10), "nan"),
    "NaN sum": (Diversity(1.0, math.nan, 10), "nan"),
    "infinite": (Diversity(math.inf, 1.0, 10), "inf"),
    "infinite beside a zero sum": (Diversity(math.inf, 0.0, 10), "inf"),
    "infinite sum": (Diversity(1.0, math.inf, 10), "inf"),
    "both infinite": (Diversity(math.inf, math.inf, 10), "inf"),
    "negative": (Diversity(1.0, -0.5, 10), "-0.5"),
    "infinite ratio": (Diversity(1.0, 5e-324, 10), "5e-324"),
}


def of(gradients):
    """The definition, over the rows of a matrix."""
    return Diversity(
        sum_of_sq_norms=float((gradients**2).sum()),
        sq_norm_of_sum=float((gradients.sum(0) ** 2).sum()),
        num_samples=len(gradients),
    )


def test_equal_gradients_have_the_least_diversity_and_no_noise():
    diversity = of(np.ones((8, 3)))
    assert diversity.value == pytest.approx(1 / 8)
    assert diversity.noise_scale == pytest.approx(0.0, abs=1e-12)


def test_orthogonal_gradients_have_diversity_one():
    assert of(np.eye(5)).value == 1.0


@given(seed=st.integers(0, 10_000), num_samples=st.integers(2, 40), dimension=st.integers(1, 8))
def test_n_times_diversity_is_one_plus_the_noise_scale(seed, num_samples, dimension):
    gradients = np.random.default_rng(seed).normal(1.0, 1.0, (num_samples, dimension))
    mean = gradients.mean(0)
    noise_scale = gradients.var(0).sum() / (mean**2).sum()
    diversity = of(gradients)
    assert num_samples * diversity.value == pytest.approx(1 + noise_scale, rel=1e-9)
    assert diversity.noise_scale == num_samples * diversity.value - 1


@pytest.mark.parametrize(("diversity", "why"), UNDEFINED.values(), ids=UNDEFINED)
def test_a_diversity_that_cannot_be_formed_says_why(diversity, why):
    assert not diversity.is_defined
    assert why in diversity.undefined_reason
    with pytest.raises(UndefinedDiversityError, match="undefined") as caught:
        _ = diversity.value
    assert why in str(caught.value)
    assert isinstance(caught.value, DivebatchError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("trace", "sq_norm", "noise_scale"),
    [
        (6.0, 2.0, 3.0),
        (-1.0, 2.0, 0.0),
        (1.0, 0.0, math.inf),
        (1.0, -1.0, math.inf),
        (0.0, 0.0, 0.0),
        (-1.0, -1.0, 0.0),
    ],
)
def test_the_noise_scale_is_never_negative_and_infinite_without_signal(trace, sq_norm, noise_scale):
    assert Diversity.from_noise(trace, sq_norm, 10).noise_scale == pytest.approx(noise_scale)


def test_the_noise_scale_is_nan_where_nothing_is_known():
    for diversity in (Diversity(math.nan, 1.0, 10), Diversity(1.0, math.nan, 10)):
        assert math.isnan(diversity.noise_scale)


# Student's t distribution


EXACT = {
    1: 12.706204736174694,
    2: 4.302652729749462,
    5.5: 2.501858617589239,
    99: 1.9842169515864174,
    100: 1.9839715185235518,
    1000: 1.9623390808264083,
    1e5: 1.9599877075346095,
}
"""The same by `scipy.stats.t.ppf`."""


@pytest.mark.parametrize(("degrees", "value"), EXACT.items())
def test_quantiles_have_ten_digits(degrees, value):
    assert t_quantile(0.975, degrees) == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("degrees", [1, 1.5, 2, 5, 7.3, 31])
def test_the_distribution_is_the_integral_of_its_density(degrees):
    """The slow twin: the density summed over fine steps."""
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    for value in (0.0, 0.3, 1.0, 2.5, 6.0):
        x = np.linspace(0.0, value, 20_001)
        density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        integral = float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        below, slope = _distribution(value, degrees)
        assert below == pytest.approx(0.5 + integral, abs=1e-7)
        assert slope == pytest.approx(density[-1])
        assert value == 0 or t_quantile(below, degrees) == pytest.approx(value)


def test_below_one_degree_of_freedom_nothing_is_known():
    assert t_quantile(0.975, 0.5) == math.inf


# The history that policies see


def seen(*, loss: float | None = None, sq_norm: float | None = None) -> Measurement:
    diversity = None if sq_norm is None else Diversity.from_noise(1.0, sq_norm, 100)
    return Measurement(epoch=1, batch_size=128, dataset_size=100, loss=loss, diversity=diversity)


def test_the_first_and_the_best_loss_are_kept():
    history, since = History(), []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.9):
        history = history.with_epoch(seen(loss=loss))
        since.append(history.epochs_since_best)
    assert (history.first_loss, history.best_loss, since) == (3.0, 1.9, [0, 0, 1, 2, 0])


def test_the_first_gradient_norm_is_the_first_that_means_something():
    history = History()
    for sq_norm in (None, -1.0, 4.0, 2.0):
        history = history.with_epoch(seen(sq_norm=sq_norm))
    assert history.first_sq_norm == 4.0


def test_epochs_at_a_size_count_from_its_change():
    history = (
        History().with_epoch(seen()).with_decision(128, Decision(batch_size=128, unclamped=9.0)).with_epoch(seen())
    )
    assert (history.decisions_at_size, history.previous_batch_size, history.unclamped) == (2, None, 9.0)
    history = history.with_decision(128, Decision(batch_size=256))
    assert (history.decisions_at_size, history.previous_batch_size, history.unclamped) == (0, 128, None)
    assert history.with_epoch(seen()).decisions_at_size == 1


def test_the_fastest_epoch_of_a_size_counts():
    history = History().with_throughput(256, 50.0).with_throughput(128, 20.0).with_throughput(256, 40.0)
    assert history.throughputs == ((128, 20.0), (256, 50.0))


def test_it_comes_back_from_any_format():
    history = History(first_loss=2.0, unclamped=5.5).with_throughput(256, 50.0)
    assert History.from_dict(asdict(history)) == History.from_dict(json.loads(json.dumps(asdict(history)))) == history
