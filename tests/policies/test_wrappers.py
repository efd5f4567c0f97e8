"""What can be put around a policy: calm, an outlet at the cap, a gentle start."""

import math
from dataclasses import replace

import pytest

from divebatch import AdaBatch, Decision, Diversity, Fixed, Measurement
from divebatch.errors import ArgumentError
from divebatch.measurement import History
from divebatch.policies import (
    Doublings,
    NoiseDoubling,
    NoiseScale,
    Policy,
    Rounded,
    SimiGrad,
    SpillOver,
    Steady,
    WarmUp,
)

CAP, N = 1000, 50_000


class Asks(Policy):
    """Wants one size after the other, up to the cap."""

    needs = frozenset({"diversity"})

    def __init__(self, *wanted: float | None) -> None:
        self.wanted = wanted

    def next(self, seen: Measurement) -> Decision:
        wanted = self.wanted[seen.epoch - 1]
        if wanted is None:
            return Decision(batch_size=seen.batch_size)
        return Decision(batch_size=int(min(CAP, wanted)), unclamped=wanted, reason="asked")

    def measures(self, epoch: int, batch_size: int) -> bool:
        return epoch % 2 == 0

    @property
    def cap(self) -> int:
        return CAP

    def check_start(self, batch_size: int) -> None:
        if batch_size > CAP:
            raise ArgumentError("above the cap")


def run(policy, epochs: int, *, batch_size: int = 100, data: int = N) -> tuple[list[int], list[float]]:
    """Sizes and the product of the learning rate factors after each epoch, as a controller keeps them."""
    history, sizes, factors, factor = History(), [], [], 1.0
    for epoch in range(1, epochs + 1):
        seen = Measurement(epoch=epoch, batch_size=batch_size, first_batch_size=100, dataset_size=data)
        history = history.with_epoch(seen)
        decision = policy.next(replace(seen, history=history)).at_most(data)
        history = history.with_decision(batch_size, decision)
        batch_size, factor = decision.batch_size, factor * decision.lr_factor
        sizes.append(batch_size)
        factors.append(factor)
    return sizes, factors


def test_steady_keeps_a_size_for_its_time():
    asks = Asks(200, 300, 400, 500, 600, 700)
    assert run(Steady(asks, dwell=3), 6)[0] == [100, 100, 400, 400, 400, 700]
    assert run(Steady(asks), 6)[0] == [200, 300, 400, 500, 600, 700]


def test_rounded_goes_by_multiples_and_never_past_the_present_size():
    asks = Asks(140, 200, 255, 256, 70, 63, None)
    assert run(Rounded(asks, 64), 7)[0] == [128, 192, 192, 256, 64, 64, 64]
    assert run(Rounded(Asks(120, 90, 30), 64), 3)[0] == [100, 64, 64]  # 120 would lead down, 90 to 64, 30 to none
    assert Rounded(SimiGrad(CAP), 64).lr_coupling == "sqrt"
    with pytest.raises(ArgumentError, match="multiple_of must be an integer of at least 1"):
        Rounded(asks, 0)


def test_doublings_of_the_first_batch_and_the_cap():
    asks = Asks(199, 200, 799, 500, 99, 30, None, CAP)
    assert run(Doublings(asks), 8)[0] == [100, 200, 400, 400, 50, 25, 25, CAP]


def test_steady_makes_no_small_change():
    asks = Asks(124, 125, 101, 100, 156, 1000)
    assert run(Steady(asks, threshold=1.25), 6)[0] == [100, 125, 125, 100, 156, 1000]


def test_spill_over_lowers_the_rate_by_what_is_over_the_cap_and_gives_it_back():
    sizes, factors = run(SpillOver(Asks(500, 2000, 4000, None, math.inf, 4000, 1000, 2000)), 8)
    assert sizes == [500, CAP, CAP, CAP, CAP, CAP, CAP, CAP]
    assert factors == pytest.approx([1, 0.5, 0.25, 0.25, 0.25, 0.25, 1, 0.5])


def test_less_than_a_sample_over_the_cap_is_rounding():
    assert run(SpillOver(Asks(CAP + 0.9, CAP + 1.0)), 2)[1] == pytest.approx([1, CAP / (CAP + 1)])


def test_warm_up_takes_the_jump_back_and_pays_it_out():
    _, factors = run(WarmUp(Asks(400, None, None, None, None), epochs=3), 5)
    assert factors == pytest.approx([1 / 4, 4 ** (1 / 3) / 4, 4 ** (2 / 3) / 4, 1, 1])
    _, roots = run(WarmUp(Asks(400, None, None), epochs=2, power=0.5), 3)
    assert roots == pytest.approx([1 / 2, math.sqrt(2) / 2, 1])


def test_a_second_jump_pays_out_what_the_first_still_owes():
    sizes, factors = run(WarmUp(Asks(200, None, 800, None, None, None), epochs=2), 6)
    assert sizes[2] == 800
    assert factors == pytest.approx([1 / 2, math.sqrt(1 / 2), 1 / 4, 1 / 2, 1, 1])


def test_a_smaller_batch_needs_no_warm_up():
    _, factors = run(WarmUp(Asks(50, None, None), epochs=2), 3)
    assert factors == [1, 1, 1]


def test_the_rate_goes_by_the_size_that_the_data_allow():
    sizes, factors = run(SpillOver(Asks(2000, 2000, 2000, 800)), 4, data=800)
    assert sizes == [800] * 4
    assert factors == pytest.approx([0.4, 0.4, 0.4, 1])
    sizes, factors = run(WarmUp(Asks(900, 900, 900, 900), epochs=2), 4, data=800)
    assert sizes == [800] * 4
    assert factors == pytest.approx([1 / 8, math.sqrt(1 / 8), 1, 1])


def test_what_settles_the_size_comes_before_what_moves_the_rate():
    asks = Asks(2000, 900, 2000, 2000, 900)  # 900 is no change worth making
    assert run(SpillOver(Steady(asks, threshold=1.25)), 5) == ([CAP] * 5, pytest.approx([0.5] * 5))
    sizes, factors = run(WarmUp(Steady(Asks(200, 400, 400, 400), dwell=3)), 4)
    assert sizes == [100, 100, 400, 400]
    assert factors == pytest.approx([1, 1, 1 / 4, 4 ** (1 / 3) / 4])
    assert run(SpillOver(Rounded(Asks(*[2000] * 3), 64)), 3) == ([960] * 3, pytest.approx([0.48] * 3))


def test_below_the_cap_rounding_does_not_move_the_rate():
    wanted = [140, 200, 255, 999, 2000, 800, 70]
    sizes, factors = run(SpillOver(Rounded(Asks(*wanted), 64)), 7)
    assert sizes == [128, 192, 192, 960, 960, 768, 64]
    assert factors == pytest.approx([1, 1, 1, 1, 0.48, 1, 1])
    found = Diversity.from_noise(1400.0, 1.0, N)  # sqrt(100 * 1400) = 374 is between two doublings
    seen = Measurement(epoch=1, batch_size=100, dataset_size=N, diversity=found, history=History(decisions_at_size=9))
    decision = SpillOver(NoiseDoubling(1600)).next(seen)
    assert (decision.batch_size, decision.unclamped) == (400, pytest.approx(374.2, abs=0.1))
    assert SpillOver(NoiseDoubling(1600)).next(replace(seen, batch_size=200)).lr_factor == 1.0


def test_spill_over_needs_a_cap():
    with pytest.raises(ArgumentError, match="Fixed has none: leave SpillOver out, or give Fixed a property `cap`"):
        SpillOver(Fixed())
    assert SpillOver(Steady(NoiseScale(64))).cap == 64


@pytest.mark.parametrize("rate", [SpillOver, WarmUp, lambda policy: WarmUp(SpillOver(policy))])
@pytest.mark.parametrize("size", [Steady, Doublings, lambda policy: Rounded(policy, 64)])
def test_the_other_order_is_refused(size, rate):
    told = r"(Steady|Doublings|Rounded) changes the size for which .* put \1 around what"
    with pytest.raises(ArgumentError, match=told):
        size(rate(Asks(100)))


def test_a_size_that_is_kept_does_not_lose_what_the_rate_is_owed():
    policy = WarmUp(Steady(Asks(200, 300, 300), threshold=2), epochs=2)
    assert run(policy, 3) == ([200] * 3, pytest.approx([1 / 2, math.sqrt(1 / 2), 1]))


@pytest.mark.parametrize("wrap", [Steady, SpillOver, WarmUp])
def test_the_rest_is_the_inner_policys(wrap):
    wrapped = wrap(Asks(100))
    assert wrapped.needs == {"diversity"}
    assert [wrapped.measures(epoch, 100) for epoch in (1, 2)] == [False, True]
    with pytest.raises(ArgumentError, match="above the cap"):
        wrapped.check_start(CAP + 1)
    assert wrap(SimiGrad(CAP)).lr_coupling == "sqrt"
    assert wrap(AdaBatch(CAP)).needs == frozenset()


WRONG = {
    "dwell": (lambda value: Steady(Asks(), dwell=value), [0, 1.5, True]),
    "threshold": (lambda value: Steady(Asks(), threshold=value), [0.5, 0, math.nan, math.inf]),
    "epochs": (lambda value: WarmUp(Asks(), epochs=value), [0, 1.5]),
    "power": (lambda value: WarmUp(Asks(), power=value), [0, math.nan]),
    "policy": (SpillOver, [None, 5]),
}


@pytest.mark.parametrize(
    ("name", "make", "value"), [(name, make, value) for name, (make, values) in WRONG.items() for value in values]
)
def test_a_wrong_setting_is_named_with_its_value(name: str, make, value: object):
    with pytest.raises(ArgumentError, match=f"{name}={value!r}"):
        make(value)
