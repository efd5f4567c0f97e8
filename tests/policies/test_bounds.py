"""Bounds: floor, cap and multiple of a batch size."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.policies import DiveBatch
from divebatch.policies.bounds import Bounds, require_start_under_cap

quickly = settings(max_examples=200, deadline=None)
PROPOSALS = st.one_of(st.floats(0, 1e4), st.just(math.inf))


def slow_clamp(floor, cap, multiple_of, proposal, at_least):
    """Try every allowed size; the lowest one is allowed even where it is no multiple."""
    lowest = min(max(floor, at_least), cap)
    allowed = [size for size in range(lowest, cap + 1) if size % multiple_of == 0 or size == lowest]
    return max((size for size in allowed if size <= proposal), default=lowest)


@quickly
@given(
    floor=st.integers(1, 60),
    room=st.integers(0, 200),
    multiple_of=st.integers(1, 40),
    proposal=PROPOSALS,
    at_least=st.integers(1, 300),
)
def test_clamp_finds_the_largest_allowed_size_that_is_not_above_the_proposal(
    floor, room, multiple_of, proposal, at_least
):
    bounds = Bounds(floor, floor + room, multiple_of)
    by_search = slow_clamp(floor, floor + room, multiple_of, proposal, at_least)
    assert bounds.clamp(proposal, at_least=at_least) == by_search
    assert type(bounds.clamp(proposal, at_least=at_least)) is int


@quickly
@given(low=PROPOSALS, high=PROPOSALS, multiple_of=st.integers(1, 64))
def test_a_larger_proposal_never_gives_a_smaller_size(low, high, multiple_of):
    low, high = sorted([low, high])
    bounds = Bounds(1, 4096, multiple_of)
    assert bounds.clamp(low) <= bounds.clamp(high)


@quickly
@given(proposal=PROPOSALS, batch_size=st.integers(1, 4096), multiple_of=st.integers(1, 64))
def test_clamping_at_least_the_present_size_never_shrinks(proposal, batch_size, multiple_of):
    assert batch_size <= Bounds(1, 4096, multiple_of).clamp(proposal, at_least=batch_size) <= 4096


def test_infinity_gives_the_cap():
    assert Bounds(1, 4096).clamp(math.inf) == 4096


@pytest.mark.parametrize("value", [0, -1, 2.5, math.nan, math.inf, True, "3", None])
@pytest.mark.parametrize("name", ["min_batch_size", "max_batch_size", "multiple_of"])
def test_bounds_are_whole_numbers_of_at_least_one(name, value):
    good = {"min_batch_size": 1, "max_batch_size": 64, "multiple_of": 1}
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1, got {name}={value!r}"):
        Bounds(*{**good, name: value}.values())


def test_the_cap_must_not_be_below_the_floor():
    assert Bounds(8, 8).clamp(100) == 8
    with pytest.raises(ArgumentError, match="max_batch_size=7 is below min_batch_size=8"):
        Bounds(8, 7)


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, math.nan, math.inf, True, "1", None])
def test_a_positive_number_is_positive_and_finite(value):
    with pytest.raises(ArgumentError, match=f"delta must be positive and finite, got delta={value!r}"):
        require_positive("delta", value)
    require_positive("delta", 1e-300)


def test_a_count_starts_at_one():
    require_count("every", 1)
    with pytest.raises(ArgumentError, match="every=0"):
        require_count("every", 0)


def test_the_first_batch_may_be_the_cap_but_not_more():
    require_start_under_cap(64, 64)
    with pytest.raises(ArgumentError, match="max_batch_size=63 is below the first batch size 64"):
        require_start_under_cap(64, 63)


def test_a_policys_cap_must_not_be_below_its_floor():
    with pytest.raises(ValueError, match="max_batch_size=4 is below min_batch_size=8"):
        DiveBatch(0.1, 4, min_batch_size=8)
