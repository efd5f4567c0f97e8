"""`NoiseDoubling`: what it asks for, in which steps, with which rate."""

import math
from typing import Any

import pytest
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, Diversity, Measurement
from divebatch.errors import ArgumentError
from divebatch.measurement import History, Spread
from divebatch.policies import NoiseDoubling, Rounded, SpillOver, Steady
from reference.per_sample import dataset, mlp


def seen(noise_scale: float, batch_size: int = 128, *, error: float = 0.0, **more) -> Measurement:
    """The noise scale with a relative error of its trace."""
    spread = Spread(trace_variance=(error * noise_scale) ** 2, sq_norm_variance=0.0, covariance=0.0, degrees=1e6)
    diversity = Diversity.from_noise(noise_scale, 1.0, 50_000, spread=spread)
    return Measurement(
        epoch=1, batch_size=batch_size, first_batch_size=128, dataset_size=50_000, diversity=diversity, **more
    )


@pytest.mark.parametrize(
    ("noise_scale", "size"),
    [
        (50.0, 128),  # below the first batch: never down
        (128.0 * 1.9, 128),  # the root of 1.9 is nearer to no doubling
        (128.0 * 2.1, 256),
        (128.0 * 7.9, 256),
        (128.0 * 8.1, 512),
        (128.0 * 120, 1024),
        (128.0 * 1e4, 2000),  # the cap itself, though no doubling
    ],
)
def test_the_geometric_mean_to_the_nearest_doubling(noise_scale: float, size: int):
    assert NoiseDoubling(2000).next(seen(noise_scale)).batch_size == size


@pytest.mark.parametrize(
    ("price", "noise_scale", "size"),
    [
        (1024.0, 200.0, 512),  # 453: more than the first batch and the noise scale, where a step costs much
        (1024.0, 100.0, 256),
        (32.0, 128.0 * 16, 256),
        (128.0, 128.0 * 8.1, 512),  # the first batch, as without one
    ],
)
def test_a_step_cost_stands_for_the_first_batch(price: float, noise_scale: float, size: int):
    decision = NoiseDoubling(2000, step_cost=price).next(seen(noise_scale))
    assert decision.batch_size == size
    assert decision.unclamped == pytest.approx(math.sqrt(price * noise_scale))
    assert decision.reason.startswith(f"sqrt({price:g} * noise scale) = ")


@pytest.mark.parametrize("price", [0.0, -1.0, math.nan, math.inf])
def test_a_step_cost_must_be_one(price: float):
    with pytest.raises(ArgumentError, match="step_cost must be positive and finite, got step_cost="):
        NoiseDoubling(4096, step_cost=price)


def test_noise_without_signal_asks_for_the_cap_and_nothing_known_for_nothing():
    known = [Diversity.from_noise(1.0, 0.0, 50_000), Diversity(math.nan, math.nan, 50_000, seen(1.0).diversity.spread)]
    measured = [Measurement(epoch=1, batch_size=128, dataset_size=50_000, diversity=each) for each in known]
    assert [NoiseDoubling(2000).next(each).batch_size for each in measured] == [2000, 128]


def test_it_never_goes_down_and_says_why_it_moves():
    assert NoiseDoubling(4096).next(seen(1000.0, 1024)).batch_size == 1024
    decision = NoiseDoubling(4096).next(seen(128.0 * 16))
    assert (decision.batch_size, decision.unclamped) == (512, pytest.approx(512.0))
    assert decision.reason.startswith("sqrt(first batch * noise scale) = 512, between 512 and 512")


def test_it_waits_until_the_whole_interval_is_above_the_present_size():
    assert NoiseDoubling(4096).next(seen(128.0 * 16, error=0.4)).batch_size == 512
    unsure = NoiseDoubling(4096).next(seen(128.0 * 16, error=0.6))
    assert unsure.batch_size == 128
    assert unsure.reason.endswith("no change")


@pytest.mark.parametrize(("coupling", "jump"), [("linear", 4.0), ("sqrt", 2.0), ("adam", 2.0), (0.6, 4**0.6)])
def test_the_rate_comes_one_decision_after_the_size(coupling: Any, jump: float):
    policy = NoiseDoubling(4096)
    grown = policy.next(seen(128.0 * 16, lr_coupling=coupling))
    assert grown.lr_factor == pytest.approx(1 / jump)
    history = History(decisions_at_size=1, previous_batch_size=128)
    after = policy.next(seen(128.0 * 16, 512, history=history, lr_coupling=coupling))
    assert (after.batch_size, after.lr_factor) == (512, pytest.approx(jump))


def test_at_the_cap_nothing_is_measured_and_the_rate_still_comes():
    policy, history = NoiseDoubling(512), History(decisions_at_size=1, previous_batch_size=128)
    assert [policy.measures(1, size) for size in (128, 256, 512)] == [True, True, False]
    at_cap = Measurement(
        epoch=2, batch_size=512, first_batch_size=128, dataset_size=50_000, history=history, lr_coupling="linear"
    )
    decision = policy.next(at_cap)
    assert (decision.batch_size, decision.lr_factor) == (512, pytest.approx(4.0))


def test_what_spills_over_at_the_cap_is_measured_there():
    policy, history = (
        SpillOver(NoiseDoubling(512)),
        History(decisions_at_size=3, previous_batch_size=512, unclamped=512.0),
    )
    assert policy.measures(5, 512)
    assert policy.next(seen(128.0 * 64, 512, history=history)).lr_factor == pytest.approx(0.5)


@pytest.mark.parametrize("wrap", [Steady, lambda policy: Rounded(policy, 64)])
def test_nothing_around_it_may_change_its_size(wrap):
    with pytest.raises(ArgumentError, match=r"changes the size for which NoiseDoubling has moved .*: .*leave it out"):
        wrap(NoiseDoubling(4096))


def test_a_coupling_that_would_change_the_noise_is_refused():
    model = mlp()
    parts = model, SGD(model.parameters(), 0.1), AdaptiveLoader(dataset(8), 4, seed=0)
    with pytest.raises(ArgumentError, match=r"leave lr_coupling out, or pass .*'linear' or 'sqrt' or 'adam'"):
        Controller(*parts, NoiseDoubling(8), lr_coupling="none")
    with pytest.raises(ArgumentError, match="above 0 and at most 1, got lr_coupling=-1"):
        Controller(*parts, NoiseDoubling(8), lr_coupling=-1)
    Controller(*parts, NoiseDoubling(8), lr_coupling=0.6, estimator="split").close()
