"""Diversity, Measurement and Decision: the objects that pass between estimators, policies and controller."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divebatch import Diversity
from divebatch.errors import DivebatchError, UndefinedDiversityError

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
