"""What rules make of estimates that say little: a single one, a wide interval, rounding."""

import pytest

from divebatch.measurement import Diversity, History, Measurement, Spread
from divebatch.policies import CABS, DiveBatch, Goodput, NoiseScale, NormTest, Policy, SimiGrad

CAP = 4096


def seen(diversity: Diversity, *, batch_size: int = 128, history: History | None = None) -> Measurement:
    return Measurement(
        epoch=1,
        batch_size=batch_size,
        dataset_size=50_000,
        first_batch_size=128,
        diversity=diversity,
        lr=0.1,
        loss=1.0,
        history=history or History(),
    )


def estimate(noise_scale: float, *, error: float = 0.0, degrees: float = 1e6) -> Diversity:
    spread = Spread(
        trace_variance=(error * noise_scale) ** 2, sq_norm_variance=error**2, covariance=0.0, degrees=degrees
    )
    return Diversity.from_noise(noise_scale, 1.0, 1000, spread=spread)


TIMED = History(decisions_at_size=2, throughputs=tuple((b, b / (1.0 + 0.002 * b)) for b in (128, 256)))
RULES: list[Policy] = [
    NoiseScale(CAP),
    NormTest(CAP),
    DiveBatch(1.0, CAP),
    SimiGrad(CAP, target_cosine=0.9),
    CABS(CAP),
    Goodput(CAP),
]


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: type(policy).__name__)
def test_a_single_estimate_moves_nothing(policy: Policy):
    """It shows no scatter, so its error is not zero but unknown: no degree of freedom is left."""
    sure, single = (estimate(5000.0, degrees=degrees) for degrees in (1e6, 0.0))
    assert policy.next(seen(sure, history=TIMED)).batch_size > 128
    decision = policy.next(seen(single, history=TIMED))
    assert decision.batch_size == 128
    assert decision.reason


@pytest.mark.parametrize("batch_size", [128, 1024])
def test_goodput_makes_no_change_that_may_be_a_loss(batch_size: int):
    """Up on a noise scale that may be small, down on one that may be large."""
    noise_scale = 900.0 if batch_size == 128 else 15.0
    chosen = [
        Goodput(CAP).next(seen(estimate(noise_scale, error=error), batch_size=batch_size, history=TIMED))
        for error in (0.02, 5.0)
    ]
    assert chosen[0].batch_size != batch_size
    assert chosen[1].batch_size == batch_size
    assert "with 95 % confidence only -" in chosen[1].reason


def test_simigrad_moves_by_multiples():
    def step(batch_size: int, noise_scale: float) -> int:
        measurement = seen(Diversity.from_noise(noise_scale, 1.0, 1000), batch_size=batch_size)
        return SimiGrad(CAP, target_cosine=0.5, multiple_of=64).next(measurement).batch_size

    assert (step(128, 1e6), step(1024, 1e6), step(40, 1e6)) == (192, 1088, 64)
    assert (step(128, 1.0), step(1024, 1.0), step(64, 1.0), step(40, 1.0)) == (64, 896, 64, 40)


def test_a_noise_scale_that_is_not_positive_is_no_noise():
    spread = Spread(trace_variance=1.0, sq_norm_variance=1e-4, covariance=0.0, degrees=1e6)
    none = Diversity.from_noise(-0.1, 1.0, 1000, spread=spread)
    assert none.noise_scale == 0.0
    assert CABS(CAP).next(seen(none)).batch_size == 16
    assert NoiseScale(CAP, monotone=False, min_batch_size=8).next(seen(none)).batch_size == 8
    assert Goodput(CAP).next(seen(none, history=TIMED)).batch_size == 128
