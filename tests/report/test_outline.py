import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from divebatch.report.curves import MOST_POINTS, Curve


def curve_of(mean):
    mean = np.asarray(mean, dtype=np.float64)
    return Curve(np.arange(1, len(mean) + 1), mean, np.full(len(mean), np.nan), np.ones(len(mean), dtype=int))


def test_a_short_curve_is_drawn_whole():
    curve = curve_of(np.sin(np.arange(MOST_POINTS)))
    assert curve.outline().tolist() == list(range(MOST_POINTS))


@settings(max_examples=20, deadline=None)
@given(st.integers(MOST_POINTS + 1, 20_000), st.integers(0, 10**6), st.floats(1, 1e6))
def test_no_peak_of_a_long_curve_disappears(length, where, height):
    mean = np.zeros(length)
    mean[where % length] = height
    mean[(7 * where + 3) % length] -= 2 * height
    curve = curve_of(mean)
    kept = curve.outline()
    drawn = curve.only(kept)
    assert len(kept) <= MOST_POINTS
    assert (drawn.mean.min(), drawn.mean.max()) == (mean.min(), mean.max())
    assert (kept[0], kept[-1]) == (0, length - 1)


def test_epochs_without_a_value_are_no_extremes():
    mean = np.full(10 * MOST_POINTS, np.nan)
    mean[::1000] = np.arange(len(mean[::1000]))
    kept = curve_of(mean).outline()
    assert np.nanmax(mean[kept]) == np.nanmax(mean)
