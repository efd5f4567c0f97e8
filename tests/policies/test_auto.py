"""Growth in the place of decay: how far at which rate, and what becomes of the rate."""

import math

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR

from divebatch import AdaptiveLoader, Auto, Controller, Measurement
from divebatch.errors import ArgumentError, UsageError
from divebatch.policies import Rounded, Steady
from reference.per_sample import dataset, mean_loss, mlp


def seen(fallen_to: float | None, batch_size: int = 64, *, samples: int = 500_000, **more) -> Measurement:
    return Measurement(
        epoch=1,
        batch_size=batch_size,
        first_batch_size=64,
        dataset_size=50_000,
        samples=samples,
        lr_schedule_ratio=fallen_to,
        **more,
    )


@pytest.mark.parametrize(
    ("fallen_to", "times"),
    [
        (1.0, 1),
        (0.85, 1),
        (0.79, 1.5),
        (0.7, 1.5),
        (0.5, 2),
        (0.39, 3),
        (0.25, 4),
        (0.16, 6),
        (0.1, 8),
        (0.0, 24),
    ],
)
def test_the_batch_grows_as_the_rate_falls_to_the_nearest_size(fallen_to: float, times: float):
    assert Auto(2048).next(seen(fallen_to)).batch_size == 64 * times


def test_it_never_goes_down_and_says_why_it_moves():
    assert Auto(2048).next(seen(1.0, 512)).batch_size == 512
    assert "0.5 of its peak" in Auto(2048).next(seen(0.5)).reason


@pytest.mark.parametrize(("cap", "size"), [(2048, 192), (191, 128), (130, 128), (64, 64)])
def test_the_cap_holds(cap: int, size: int):
    assert Auto(cap).next(seen(0.3)).batch_size == size


def test_a_size_needs_steps_before_it_or_samples_behind_it():
    assert Auto(2048, total_samples=500_000 + 40 * 128).next(seen(0.3)).batch_size == 128
    assert Auto(2048, total_samples=500_000 + 40 * 64).next(seen(0.3)).batch_size == 64
    assert Auto(2048).next(seen(0.3, samples=250 * 128)).batch_size == 128


@pytest.mark.parametrize(
    ("coupling", "power"), [("linear", 1.0), ("sqrt", 0.5), ("adam", 0.5), (0.6, 0.6), ("none", 0.0)]
)
@pytest.mark.parametrize("fallen_to", [0.85, 0.5, 0.3, 0.05])
def test_the_rate_follows_and_never_exceeds_the_highest(coupling, power: float, fallen_to: float):
    grown = Auto(2048).next(seen(fallen_to, lr_coupling=coupling))
    times = grown.batch_size / 64
    in_force = fallen_to * grown.lr_factor * times**power
    assert in_force == pytest.approx(min(1.0, fallen_to * times**power))
    # What was held back comes as the schedule falls, and is not held back twice.
    growth = grown.lr_factor * times**power
    later = Auto(2048).next(seen(fallen_to * 0.98, grown.batch_size, lr_coupling=coupling, lr_growth=growth))
    if later.batch_size == grown.batch_size:
        assert 0.98 * fallen_to * growth * later.lr_factor == pytest.approx(min(1.0, 0.98 * fallen_to * times**power))


def test_a_rate_that_rises_again_is_no_higher_than_before():
    up = Auto(2048).next(seen(1.0, 512, lr_coupling="linear", lr_growth=8.0))
    assert (up.batch_size, up.lr_factor) == (512, pytest.approx(1 / 8))


def test_nothing_to_trade_is_said_with_what_to_take():
    decision = Auto(2048).next(seen(1.0))
    assert decision.batch_size == 64
    assert "nothing to trade" in decision.reason
    assert "total_samples=" in decision.reason
    assert Auto(2048).next(seen(math.nan)).batch_size == 64
    with pytest.raises(UsageError, match="schedule's own rate"):
        Auto(2048).next(seen(None))


@pytest.mark.parametrize("wrong", [{"max_batch_size": 0}, {"max_batch_size": 64, "total_samples": 0}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ArgumentError, match=list(wrong)[-1]):
        Auto(**wrong)
    with pytest.raises(ArgumentError, match="max_batch_size=32 is below the first batch size 64"):
        Auto(32).check_start(64)


@pytest.mark.parametrize("wrap", [Steady, lambda policy: Rounded(policy, 64)])
def test_nothing_around_it_may_change_its_size(wrap):
    with pytest.raises(ArgumentError, match=r"changes the size for which Auto has moved"):
        wrap(Auto(4096))


# In a training


def trained(make_optimizer, make_schedule, *, epochs: int = 12, policy: Auto | None = None, stop: int = 0):
    """Return the records and the rates used in each epoch; with `stop`, a second controller goes on from there."""
    torch.manual_seed(0)
    model = mlp()
    rates: list[float] = []

    def parts():
        optimizer = make_optimizer(model.parameters())
        loader = AdaptiveLoader(dataset(2048), batch_size=8, seed=0)
        schedule = make_schedule(optimizer)
        control = Controller(model, optimizer, loader, policy or Auto(256), scheduler=schedule)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer, loader, control, schedule

    optimizer, loader, control, schedule = parts()
    records = []
    for epoch in range(epochs):
        if epoch and epoch == stop:
            saved = control.state_dict(), optimizer.state_dict(), schedule.state_dict()
            control.close()
            optimizer, loader, control, schedule = parts()
            control.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
        for x, y in loader:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        schedule.step()
        records.append(control.step())
    control.close()
    return records, rates


COSINE = (lambda parameters: SGD(parameters, 0.01), lambda optimizer: CosineAnnealingLR(optimizer, 12))


def test_one_line_is_enough_and_costs_nothing():
    records, rates = trained(*COSINE)
    sizes = [each.next_batch_size for each in records]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 64
    assert max(rates) <= 0.01 * (1 + 1e-9)
    assert not any(each.measured for each in records)
    assert records[-1].steps < 0.7 * 12 * 2048 / 8


def test_a_resume_in_the_middle_goes_on_exactly():
    whole, rates = trained(*COSINE)
    again, rates_again = trained(*COSINE, stop=7)
    assert [each.next_batch_size for each in again] == [each.next_batch_size for each in whole]
    assert rates_again == pytest.approx(rates)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [4, 8], 0.1),
        lambda optimizer: LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 4) if epoch < 6 else 0.2),
        lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 - 0.3 * (epoch % 4)),  # rises again
    ],
    ids=["steps", "warm-up", "restarts"],
)
@pytest.mark.parametrize("make_optimizer", [lambda p: SGD(p, 0.01), lambda p: AdamW(p, 0.001)], ids=["sgd", "adamw"])
def test_the_rate_in_force_is_never_above_the_schedules_highest(make_optimizer, schedule):
    records, rates = trained(make_optimizer, schedule)
    assert max(rates) <= make_optimizer(mlp().parameters()).defaults["lr"] * (1 + 1e-9)
    assert records[-1].next_batch_size > 8


def test_of_groups_with_schedules_of_their_own_the_rate_that_fell_least_counts():
    def two_groups(parameters):
        first, *others = parameters
        return SGD([{"params": [first]}, {"params": others}], 0.01)

    def schedules(second):
        return lambda optimizer: LambdaLR(optimizer, [lambda epoch: 0.5**epoch, second])

    records, _ = trained(two_groups, schedules(lambda epoch: 1.0), epochs=4)
    assert {each.next_batch_size for each in records} == {8}
    records, _ = trained(two_groups, schedules(lambda epoch: 1.0 if epoch < 2 else 0.5), epochs=4)
    assert [each.next_batch_size for each in records] == [8, 16, 16, 16]


def test_with_a_horizon_a_constant_rate_is_enough():
    ramp = Auto(2048, total_samples=200_000)
    sizes = [ramp.next(seen(1.0, samples=int(part * 200_000))).batch_size for part in (0.0, 0.4, 0.5, 0.8, 0.875, 0.99)]
    assert sizes == [64, 96, 128, 256, 256, 64]  # at last no 40 steps are left for more, and what has grown stays
    assert ramp.next(seen(1.0, 512, samples=198_000)).batch_size == 512
    decision = ramp.next(seen(1.0, samples=100_000, lr_coupling="linear"))
    assert decision.lr_factor * decision.batch_size / 64 == pytest.approx(1.0)  # the rate stays


def test_training_beyond_the_horizon_keeps_its_size_and_warns():
    with pytest.warns(UserWarning, match=r"Auto\(\.\.\., total_samples=EPOCHS \* len\(dataset\)\)"):
        beyond = Auto(2048, total_samples=200_000).next(seen(1.0, 512, samples=400_000))
    assert (beyond.batch_size, beyond.lr_factor) == (512, 1.0)
