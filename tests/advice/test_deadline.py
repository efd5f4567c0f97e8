"""Which batch size gets farthest in a given time, against the formula by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divebatch import Advice
from divebatch.advice.deadline import CLOSE, LEAST_STEPS
from divebatch.advice.noise import NoiseCourse, NoiseEstimate
from divebatch.advice.tradeoff import StepTimes, time_to_progress
from divebatch.errors import ArgumentError

SIZES = (8, 16, 32, 64, 128)


def advice(noise=100.0, *, low=None, high=None, seconds=None, **settings):
    now = NoiseEstimate(1, 100, noise, low or (noise or 10.0) / 2, high or 2 * (noise or 100.0))
    times = StepTimes(tuple(seconds or ((size, 0.01 + size * 0.001) for size in SIZES)))
    defaults = {"reference_batch_size": 16, "reference_lr": 0.1, "adaptive": False, "dataset_size": 1000}
    return Advice(noise=NoiseCourse((now,), now), times=times, **{**defaults, **settings})


def by_hand(noise, seconds, samples=math.inf):
    """Steps in the time, or as many as the data last for, each worth 1 / (1 + B/b)."""
    steps = {size: min(int(seconds / (0.01 + size * 0.001)), samples // size) for size in SIZES}
    return {size: count / (1 + noise / size) for size, count in steps.items() if count >= LEAST_STEPS}


@given(noise=st.floats(0.0, 1e5), seconds=st.floats(2.0, 1e4), samples=st.integers(1500, 10**6))
def test_the_best_size_makes_the_most_progress_in_the_time_and_with_the_data(noise, seconds, samples):
    for most in (None, samples):
        found = advice(noise).for_deadline(seconds, samples=most)
        worth = by_hand(math.sqrt(10) * noise, seconds, most or math.inf)  # it grows in training
        assert worth[found.batch_size] == max(worth.values())
        assert {reach.batch_size: reach.progress for reach in found.reaches} == pytest.approx(
            {size: each / max(worth.values()) for size, each in worth.items()}
        )
        close = [size for size, each in worth.items() if each >= (1 - CLOSE) * max(worth.values())]
        assert found.close == (min(close), max(close))


@given(noise=st.floats(0.0, 1e5))
def test_in_a_long_time_with_data_enough_it_is_the_batch_that_trains_fastest(noise):
    found = advice(noise).for_deadline(1e6)
    took = dict(time_to_progress(found.times, found.middle_noise))
    assert took[found.batch_size] == pytest.approx(min(took.values()), rel=1e-4)


def test_where_the_pass_ends_first_the_smallest_batch_makes_most_of_it():
    found = advice(1000.0).for_deadline(1000.0, samples=2000)
    assert found.batch_size == 8
    assert all(reach.seconds < 1000 for reach in found.reaches)
    assert "The one pass over 2000 samples ends before the time does: batch 8 is through after 4.5 s" in str(found)
    assert advice(1000.0).for_deadline(1000.0).batch_size > 8


def test_more_noise_never_asks_for_a_smaller_batch():
    found = advice().for_deadline(100.0)
    sizes = [found.best_for(noise) for noise in (0.0, 10.0, 100.0, 1e3, 1e5, math.inf)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 128
    assert found.batch_size_range == (found.best_for(50.0), found.best_for(2000.0))


def test_words_name_the_best_its_neighbours_its_rate_and_what_more_noise_would_ask_for():
    found, noise = advice(100.0, low=1.0, high=1000.0).for_deadline(20.0), 100 * math.sqrt(10)
    words = str(found)
    assert "In 20 s of training, at a noise scale of 316 samples, for it grows in training" in words
    assert "batch 8: 1111 steps, 8888 samples, 60 % of the most progress" in words
    rate = 0.1 * (1 + noise / 16) / (1 + noise / 64)
    assert found.lr == pytest.approx(rate)
    assert f"The best by the model is batch 64 (no other within 2 %), learning rate {rate:.3g}; at" in words
    assert "at the lower end of the noise measured now batch 8, at ten times its upper end batch 128" in words
    assert "Batch 64 goes through the 1000 samples 17 times" in words


def test_without_a_noise_scale_there_is_a_range_and_no_best():
    found = advice(None, low=5.0, high=math.inf).for_deadline(20.0)
    assert (found.batch_size, found.lr) == (None, None)
    assert found.batch_size_range == (8, 128)
    assert "cannot be told, so neither can the best batch: between 8 and 128" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_sizes_that_make_a_handful_of_steps_are_no_candidates():
    found = advice(1e6).for_deadline(0.5)  # 128: 3 steps; 32: 11
    assert [reach.batch_size for reach in found.reaches] == [8, 16, 32]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": 0}, "seconds must be positive and finite, got seconds=0"),
        ({"seconds": -1.0}, "seconds must be positive and finite"),
        ({"seconds": math.nan}, "seconds must be positive and finite"),
        ({"seconds": math.inf}, "seconds must be positive and finite"),
        ({"seconds": 0.1}, r"seconds=0.1 are too few: the fastest step, of batch 8, takes 0.018 s, and no batch"),
        ({"seconds": 10.0, "samples": 50}, "makes 10 steps of the 50 samples there are"),
        ({"seconds": 10.0, "samples": 0}, "samples must be"),
    ],
)
def test_what_is_no_deadline_is_told(settings, message):
    with pytest.raises(ArgumentError, match=message):
        advice().for_deadline(**settings)
