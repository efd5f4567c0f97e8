"""The noise scale in anybody's loop: against the estimator `moments` on the same steps, and against the truth."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

from divebatch import NoiseMeter
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Moments, TrainingContext
from divebatch.noise_meter import NoiseScale
from reference.delivery import Delivered, attach
from reference.known_noise import SQ_NORM, TRACE, draws, half_squares, linear

Made = Callable[[Any], Optimizer]


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, 0.01, momentum=0.9)


BATCH = 512


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(draws(torch.Generator().manual_seed(1), 10, BATCH))


def stepped(model: nn.Module, optimizer: Optimizer, *parts: tuple[Tensor, Tensor], scale: float = 1.0) -> None:
    optimizer.zero_grad()
    for x, y in parts:
        (half_squares(model(x), y) * scale / len(parts)).backward()
    optimizer.step()


def by_moments(make: Made, *, skipped: int = 0, **settings: Any) -> NoiseScale:
    """What `moments` says of the same steps, of which the first are not looked at."""
    model, delivered, estimator = linear(), [0], Moments(**settings)
    optimizer = make(model.parameters())
    attach(estimator, TrainingContext(model, Delivered(lambda: delivered[0]), optimizer))
    for number, batch in enumerate(batches()):
        if number == skipped:
            estimator.start()
        delivered[0] += BATCH
        stepped(model, optimizer, batch)
    found = estimator.finish()
    return NoiseScale(found.noise_scale, *found.noise_scale_interval(), steps=10 - skipped)


def assert_same(reading: NoiseScale, expected: NoiseScale) -> None:
    found, wanted = ((each.value, each.low, each.high, each.steps) for each in (reading, expected))
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (momentum, {}),
        (momentum, {"every_steps": 4}),
        (lambda p: AdamW(p, 1e-3), {}),
        (lambda p: AdamW(p, 1e-3), {"preconditioned": True}),
        (momentum, {"sketch": True}),
    ],
    ids=["momentum", "now and then", "AdamW", "preconditioned", "sketched"],
)
def test_it_says_what_moments_says(make: Made, settings: dict[str, Any]):
    model = linear()
    optimizer = make(model.parameters())
    with NoiseMeter(optimizer, **settings) as meter:
        for batch in batches():
            stepped(model, optimizer, batch)
        assert_same(meter.read(BATCH), by_moments(make, **settings))


def test_without_momentum_there_is_only_an_upper_end_and_a_warning_says_why():
    model = linear()
    optimizer = SGD(model.parameters(), 0.01)
    with pytest.warns(
        UserWarning, match=r"at most: SGD has a momentum below 0.4.* Give the optimizer momentum"
    ) as told:
        meter = NoiseMeter(optimizer)
    assert told[0].filename == __file__
    for batch in batches():
        stepped(model, optimizer, batch)
    reading = meter.read(BATCH)
    assert reading.low == 0
    assert_same(reading, by_moments(lambda p: SGD(p, 0.01)))
    assert str(NoiseScale(3.0, 0.0, 9.0, 10)) == "noise scale at most 9 samples"


def test_each_reading_is_of_the_steps_since_the_last_one():
    model = linear()
    optimizer = momentum(model.parameters())
    meter, found = NoiseMeter(optimizer), []
    for number, batch in enumerate(batches()):
        if number == 5:
            found.append(meter.read(BATCH))
        stepped(model, optimizer, batch)
    found.append(meter.read(BATCH))
    assert [each.steps for each in found] == [5, 5]
    # The second one also compares its first steps with the two before.
    assert_same(found[1], NoiseScale(**{**_fields(by_moments(momentum, skipped=3)), "steps": 5}))
    with pytest.raises(UsageError, match=r"no step of this SGD was seen since the last reading.*torch\.compile"):
        meter.read(BATCH)


def _fields(reading: NoiseScale) -> dict[str, Any]:
    return {name: getattr(reading, name) for name in ("value", "low", "high", "steps")}


@pytest.mark.parametrize("case", ["accumulated", "a sum", "larger batches", "not zeroed"])
def test_what_a_step_holds_is_the_loops_affair(case: str):
    """A noise scale in batches, times the samples of one: a common factor of all gradients drops out."""
    found = []
    for changed in (False, True):
        model = linear()
        optimizer = momentum(model.parameters())
        factor = 4.0 if changed and case == "a sum" else 1.0
        for group in optimizer.param_groups:
            group["lr"] /= factor
        meter = NoiseMeter(optimizer)
        for x, y in batches():
            parts = [(x[:256], y[:256]), (x[256:], y[256:])] if changed and case == "accumulated" else [(x, y)]
            stepped(model, optimizer, *parts, scale=factor)
            if changed and case == "not zeroed":
                optimizer.zero_grad(set_to_none=False)
        found.append(meter.read(3 * BATCH if changed and case == "larger batches" else BATCH))
    times = 3 if case == "larger batches" else 1
    assert (found[1].value, found[1].high) == pytest.approx((times * found[0].value, times * found[0].high), rel=1e-9)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_grad_scalers_scale_is_undone_and_what_it_skips_left_out(is_fused: bool):
    expected, found = None, None
    for scaled in (False, True):
        model = linear()
        optimizer = SGD(model.parameters(), 0.01, momentum=0.9, fused=is_fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        meter = NoiseMeter(optimizer)
        for number, (x, y) in enumerate(batches()):
            if scaled and number == 4:  # overflows, so that the step is skipped
                optimizer.zero_grad()
                scaler.scale(half_squares(model(x), y) * math.inf).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            scaler.scale(half_squares(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        expected, found = found, meter.read(BATCH)
    assert expected is not None
    assert_same(found, expected)


def test_at_fixed_weights_its_intervals_hold_the_truth():
    model = linear()
    optimizer = SGD(model.parameters(), 0.0, momentum=0.9)
    meter, generator, held = NoiseMeter(optimizer), torch.Generator(), 0
    for draw in range(100):
        for x, y in draws(generator.manual_seed(draw), 16, 64):
            optimizer.zero_grad()
            half_squares(model(x), y).backward()
            optimizer.step()
        reading = meter.read(64)
        held += reading.low <= TRACE / SQ_NORM <= reading.high
    assert 88 <= held <= 100


def test_parameters_that_come_go_or_are_frozen():
    model = nn.Sequential(linear(), nn.Linear(1, 1).double())
    head, body = list(model.parameters())[:1], list(model.parameters())[1:]
    for p in body:
        p.requires_grad_(False)
    optimizer = momentum(head)
    meter = NoiseMeter(optimizer)
    for number, batch in enumerate(batches()):
        if number == 5:
            for p in body:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": body})
            meter.read(BATCH)
        stepped(model, optimizer, batch)
    reading = meter.read(BATCH)
    assert reading.steps == 5
    assert meter._parameters.keys() == {"0", "1", "2"}
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"SGD has no parameter that is trained: all are frozen"):
        NoiseMeter(momentum(frozen.parameters()))


def test_sparse_gradients_count_as_what_they_stand_for():
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(8, 3, sparse=sparse).double()
        optimizer = SparseAdam(model.parameters(), 1e-3) if sparse else None
        watched = optimizer or torch.optim.Adam(model.parameters(), 0.0)
        for group in watched.param_groups:
            group["lr"] = 0.0
        meter = NoiseMeter(watched)
        for number in range(12):
            watched.zero_grad()
            rows = torch.randint(0, 8, (4,), generator=torch.Generator().manual_seed(number))
            (model(rows) + 1).square().sum().backward()
            watched.step()
        found.append(meter.read(BATCH))
    assert_same(found[1], found[0])


def test_a_step_by_a_closure_is_seen_after_it_ran():
    model = linear()
    optimizer = momentum(model.parameters())
    meter = NoiseMeter(optimizer)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = half_squares(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(meter.read(BATCH), by_moments(momentum))


@pytest.mark.parametrize(("own_momentum", "settings"), [(0.9, {}), (0.0, {}), (0.9, {"sketch": True})])
@pytest.mark.filterwarnings("ignore:NoiseMeter can only say")
def test_an_update_of_ones_own_is_measured_as_an_optimizers(own_momentum: float, settings: dict[str, Any]):
    model = linear()
    moved = [torch.zeros_like(p) for p in model.parameters()]
    meter = NoiseMeter(momentum=own_momentum, **settings)
    for x, y in batches():
        model.zero_grad()
        half_squares(model(x), y).backward()
        meter.observe(model.parameters())
        with torch.no_grad():
            for p, velocity in zip(model.parameters(), moved, strict=True):
                velocity.mul_(own_momentum).add_(p.grad)
                p.sub_(0.01 * velocity)
    assert_same(meter.read(BATCH), by_moments(lambda p: SGD(p, 0.01, momentum=own_momentum), **settings))


def test_wrong_uses_of_observe_name_the_way_out():
    model = linear()
    with pytest.warns(UserWarning, match=r"your own update has a momentum.*NoiseMeter\(momentum="):
        meter = NoiseMeter()
    once = model.parameters()
    meter.observe(once)  # without gradients: no step
    with pytest.raises(UsageError, match=r"no gradient was seen.*meter\.observe\(parameters\) before"):
        meter.read(BATCH)
    with pytest.raises(ArgumentError, match=r"no parameter that is trained.*only once"):
        meter.observe(once)
    meter.close()
    with pytest.raises(UsageError, match="this meter is closed"):
        meter.observe(model.parameters())
    with pytest.raises(UsageError, match=r"leave observe\(\) out"):
        NoiseMeter(momentum(model.parameters())).observe(model.parameters())
    with pytest.raises(ArgumentError, match="pass the torch optimizer"):
        NoiseMeter(preconditioned=True)
    with pytest.raises(ArgumentError, match=r"leave momentum=0\.9 out"):
        NoiseMeter(momentum(model.parameters()), momentum=0.9)


def test_too_few_steps_say_nothing():
    model = linear()
    optimizer = momentum(model.parameters())
    meter = NoiseMeter(optimizer)
    stepped(model, optimizer, batches()[0])
    reading = meter.read(BATCH)
    assert math.isnan(reading.value)
    assert (reading.low, reading.high, reading.steps) == (0.0, math.inf, 1)
    assert str(reading) == "noise scale not known"
    assert str(NoiseScale(1e9, 30.0, math.inf, 5)) == "noise scale at least 30 samples"


def test_what_it_is_not_for():
    model = linear()
    meter = NoiseMeter(momentum(model.parameters()))
    for wrong in (0, 2.5, True):
        with pytest.raises(ArgumentError, match="batch_size must be an integer of at least 1"):
            meter.read(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="optimizer must be a torch optimizer, got Linear"):
        NoiseMeter(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="preconditioned=True is for optimizers that divide"):
        NoiseMeter(momentum(model.parameters()), preconditioned=True)


def test_once_closed_it_watches_no_more():
    model = linear()
    optimizer = momentum(model.parameters())
    with NoiseMeter(optimizer) as meter:
        stepped(model, optimizer, batches()[0])
    assert not optimizer._optimizer_step_pre_hooks
    meter.close()
    with pytest.raises(UsageError, match="this meter is closed"):
        meter.read(BATCH)
