"""The controller's course against one computed by hand, and what happens around it."""

import gc
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import divebatch
from divebatch import (
    AdaBatch,
    AdaptiveLoader,
    Auto,
    Controller,
    Decision,
    DiveBatch,
    EpochRecord,
    Fixed,
    Measurement,
    Oracle,
    micro_batches,
)
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.estimators import PerSample
from divebatch.policies import NoiseDoubling, NoiseScale, Policy
from reference import per_sample
from reference.per_sample import dataset, mean_loss, mlp, num_hooks
from training import DATA, Training

pytestmark = pytest.mark.filterwarnings("ignore:.* cannot grow the batch")


def grow(**settings: Any) -> Training:
    return Training(DiveBatch(0.3, 16), lr_coupling="linear", **settings)


def at_once(cap: int, **settings: Any) -> DiveBatch:
    """To the cap after the first epoch."""
    return DiveBatch(1e9, cap, **settings)


# The course


def test_the_course_of_the_hello_world_is_the_papers_rule():
    run, twin = grow(measure_always=True), mlp()
    optimizer, loader, sizes = SGD(twin.parameters(), 0.01), AdaptiveLoader(DATA, 4, seed=3), [4]
    for record in run.epochs(6):
        expected = per_sample.trajectory(twin, mean_loss, optimizer, loader)
        wanted = max(sizes[-1], min(16, int(0.3 * 40 * expected.value)))
        assert record.diversity == pytest.approx(expected.value, rel=1e-9)
        assert (record.batch_size, record.next_batch_size) == (sizes[-1], wanted)
        loader.batch_size, optimizer.param_groups[0]["lr"] = wanted, 0.01 * wanted / 4
        sizes.append(wanted)
    assert len(set(sizes)) > 2
    for mine, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_record_says_what_was_in_force_and_what_comes_next():
    first, second = Training(at_once(16), lr_coupling="linear").epochs(2)
    assert (first.epoch, first.batch_size, first.lr, first.steps, first.samples) == (1, 4, 0.01, 10, 40)
    assert (first.next_batch_size, first.next_lr) == (16, pytest.approx(0.04))
    assert (second.epoch, second.batch_size, second.steps, second.samples) == (2, 16, 13, 80)
    assert second.lr == first.next_lr
    assert re.fullmatch(r"epoch 1  diversity \d\.\d+  batch 4 -> 16  lr 0\.01 -> 0\.04", str(first))
    assert "capped at 16" in first.reason


def test_a_policy_sees_the_counters_the_rate_and_the_schedules_own_ratio():
    seen: list[Measurement] = []

    class Spy(Policy):
        needs: ClassVar[frozenset[str]] = frozenset()

        def next(self, measurement: Measurement) -> Decision:
            seen.append(measurement)
            return Decision(batch_size=8, lr_factor=0.5)

    run = Training(Spy(), lr_coupling="linear", scheduler=lambda o: StepLR(o, 1, gamma=0.1))
    for _ in range(2):
        run.train()
        run.scheduler.step()
        run.control.step()
    counters = [(m.epoch, m.batch_size, m.dataset_size, m.step, m.samples, m.diversity) for m in seen]
    assert counters == [(1, 4, 40, 10, 40, None), (2, 8, 40, 15, 80, None)]
    assert [m.lr for m in seen] == pytest.approx([0.01, 0.01 * 0.1 * 2 * 0.5])
    assert [m.lr_schedule_ratio for m in seen] == pytest.approx([0.1, 0.01])


# What cannot be followed


def test_no_batch_is_larger_than_the_dataset_and_the_rate_follows_the_real_size():
    (record,) = Training(at_once(4096), lr_coupling="linear").epochs(1)
    assert (record.next_batch_size, record.next_lr) == (40, pytest.approx(0.1))
    assert "limited to the 40 samples" in record.reason


def test_what_drop_last_leaves_out_is_not_counted_among_the_samples_that_were_measured():
    """The rule is delta * n * diversity; sums over m < n samples are told as those of n alike."""
    run = Training(DiveBatch.algorithm_1(1.0, 40), data=AdaptiveLoader(DATA, 22, seed=3, drop_last=True))
    run.optimizer.param_groups[0]["lr"] = 0.0
    (held,) = AdaptiveLoader(DATA, 22, seed=3, drop_last=True)
    (record,) = run.epochs(1)
    true = per_sample.diversity(run.model, mean_loss, [held])
    assert record.next_batch_size == int(22 * true.value) < int(40 * true.value)
    assert len(DATA) * record.diversity == pytest.approx(22 * true.value, rel=1e-6)


def test_nan_gradients_give_the_cap():
    inputs, targets = (tensor.clone() for tensor in DATA.tensors)
    inputs[5, 0] = float("nan")
    (record,) = Training(DiveBatch(0.1, 16), data=TensorDataset(inputs, targets), lr_coupling="linear").epochs(1)
    assert (record.diversity, record.next_batch_size, record.next_lr) == (None, 16, pytest.approx(0.04))
    assert "NaN or infinite gradients" in record.reason


# What is measured


def hooks_in_each_epoch(run: Training, count: int) -> list[set[int]]:
    seen = []
    for _ in range(count):
        seen.append({num_hooks(run.model) for _ in run.batches()})
        run.control.step()
    return seen


UNMEASURED = {
    "fixed": (Fixed(), {}, [0, 0, 0]),
    "adabatch": (AdaBatch(16, every_epochs=1), {}, [0, 0, 0]),
    "every second epoch": (DiveBatch(0.1, 16, every_epochs=2), {}, [0, 6, 0]),
    "at the cap": (at_once(16), {}, [6, 0, 0]),
    "oracle": (DiveBatch(0.1, 16), {"estimator": Oracle(mean_loss)}, [0, 0, 0]),
    "every epoch": (DiveBatch(0.1, 16), {}, [6, 6, 6]),
}


@pytest.mark.parametrize("case", UNMEASURED)
def test_what_is_not_measured_has_no_hooks(case: str):
    policy, settings, expected = UNMEASURED[case]
    assert hooks_in_each_epoch(Training(policy, **settings), 3) == [{count} for count in expected]


def num_copies(model: nn.Module) -> int:
    """Tensors with the shape of the largest parameter in memory that is neither its own nor its gradient's."""
    gc.collect()
    largest = max(model.parameters(), key=torch.numel)
    alike = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.shape == largest.shape]
    own = {each.data_ptr() for each in (largest, largest.grad) if each is not None}
    return len({each.data_ptr() for each in alike} - own)


@pytest.mark.parametrize("estimator", ["trajectory", "split", "moments", "per-sample"])
def test_between_epochs_nothing_is_attached_to_the_model(estimator: str):
    model = nn.Sequential(nn.Linear(4, 61), nn.Tanh(), nn.Linear(61, 3)).double()  # of a size that no other test has
    run = Training(NoiseScale(16), model=model, estimator=estimator, measure_always=True)
    assert (num_hooks(model), num_copies(model)) == (0, 0)
    for _ in range(2):
        iter(run.loader)
        assert (num_hooks(model), num_copies(model)) == (0, 0)
        attached = []
        for x, y in run.loader:
            attached.append(num_hooks(model) > 0)
            for part, weight in micro_batches((x, y), 2):
                (mean_loss(model(part[0]), part[1]) * weight).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert set(attached) == {estimator != "moments"}  # which looks at steps alone
        run.control.step()
        assert (num_hooks(model), num_copies(model)) == (0, 0)


def test_fixed_trains_any_model_and_asks_for_no_rule():
    model = nn.Sequential(mlp(), nn.PReLU(dtype=torch.float64))
    assert [record.diversity for record in Training(Fixed(), model=model).epochs(2)] == [None, None]
    with pytest.raises(CoverageError, match=r"'1\.weight' of PReLU"):
        Training(DiveBatch(0.1, 16), model=model)


def peek(run: Training) -> None:
    next(iter(run.loader))


def evaluate(run: Training) -> None:
    mean_loss(run.model(DATA.tensors[0]), DATA.tensors[1]).backward()


def break_off(run: Training) -> None:
    group = run.optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 0.0
    for _, _ in zip(range(2), run.batches(), strict=False):
        pass
    group["lr"] = lr


@pytest.mark.filterwarnings("ignore:epoch . was left after")
@pytest.mark.parametrize("happening", [peek, evaluate, break_off])
def test_what_happens_between_epochs_does_not_count(happening: Callable[[Training], None]):
    run, undisturbed = grow(), grow()
    for expected in undisturbed.epochs(3):
        happening(run)
        assert run.epochs(1) == [expected]


# Calls at the wrong time


def test_step_without_an_epoch_gets_an_error_and_loses_nothing():
    run, undisturbed = grow(), grow()
    for expected in undisturbed.epochs(3):
        with pytest.raises(UsageError, match=r"no epoch has ended since the last step\(\)"):
            run.control.step()
        assert run.epochs(1) == [expected]


def test_step_in_mid_epoch_gets_an_error_and_loses_nothing():
    run, undisturbed = grow(), grow()
    for done, _ in enumerate(run.batches(), 1):
        if done < 10:
            with pytest.raises(UsageError, match=f"epoch 1 has not ended: {done} of 10 batches"):
                run.control.step()
    assert [run.control.step()] == undisturbed.epochs(1)


def test_a_loop_that_stops_at_the_last_batch_has_ended_the_epoch():
    run, undisturbed = grow(), grow()
    for _, _ in zip(range(10), run.batches(), strict=False):
        pass
    assert [run.control.step()] == undisturbed.epochs(1)


def test_two_epochs_without_step_get_an_error_that_stays():
    run = grow()
    run.train()
    with pytest.warns(UserWarning, match=r"epoch 1 has ended without a call of control\.step"):
        run.train()
    for _ in range(2):
        with pytest.raises(UsageError, match="once after each epoch: 2 epochs have ended"):
            run.control.step()
    with pytest.raises(UsageError, match=r"call step\(\) before saving"):
        run.control.state_dict()


def test_saving_between_the_epochs_end_and_step_gets_an_error_and_loses_nothing():
    run, undisturbed = grow(), grow()
    for expected in undisturbed.epochs(2):
        run.train()
        with pytest.raises(UsageError, match=r"call step\(\) before saving"):
            run.control.state_dict()
        assert run.control.step() == expected


def test_a_loader_that_has_run_before_is_taken_as_it_stands():
    run = grow()
    run.control.close()
    run.train()
    control = Controller(run.model, run.optimizer, run.loader, DiveBatch(0.3, 16))
    assert control.state_dict()["epoch"] == 1
    run.train()
    assert control.step().epoch == 2


# Wrong parts


def test_a_plain_dataloader_is_refused_with_the_way_out():
    model = mlp()
    with pytest.raises(ArgumentError, match=r"got DataLoader; for a DataLoader: AdaptiveLoader\.wrap\(dataloader\)"):
        Controller(model, SGD(model.parameters(), 0.1), DataLoader(DATA), Fixed())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "magic"}, "unknown estimator 'magic'; known: trajectory, oracle"),
        ({"estimator": "oracle"}, "needs the loss"),
        ({"lr_coupling": "cubic"}, "unknown lr_coupling 'cubic'; known: none, linear, sqrt"),
        ({"loss_reduction": "median"}, "unknown loss_reduction 'median'; known: mean, sum"),
        ({"model": mlp().requires_grad_(False)}, "Sequential has no trainable parameter"),
    ],
)
def test_wrong_settings_get_an_error_and_leave_nothing_attached(settings: dict[str, Any], message: str):
    settings = {"model": mlp(), **settings}
    with pytest.raises(ArgumentError, match=message):
        Training(DiveBatch(0.1, 16), **settings)
    assert num_hooks(settings["model"]) == 0


def test_a_controller_that_could_not_be_made_leaves_everything_as_it_was():
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=3), PerSample()
    optimizer = SGD(model.parameters(), 0.01)
    for wrong in ({"scheduler": 3}, {"scheduler_unit": "steps"}, {"every_steps": 0}, {"lr_coupling": "cubic"}):
        with pytest.raises(ArgumentError):
            Controller(model, optimizer, loader, DiveBatch(0.3, 16), estimator=estimator, **wrong)
    assert (
        num_hooks(model) == len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    )
    control = Controller(model, optimizer, loader, DiveBatch(0.3, 16), estimator=estimator)  # which belongs to nobody
    for x, y in loader:
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()
    assert control.step().epoch == 1


# What a step costs


@pytest.mark.parametrize(
    ("policy", "estimator", "most"),
    [
        (Fixed(), None, 16),
        (Auto(128), None, 16),
        (NoiseDoubling(128), "moments", 40),
        (DiveBatch(1e-9, 128), "trajectory", 105),
    ],
)
def test_a_step_makes_few_calls_of_ours(policy: Policy, estimator: str | None, most: int):
    """Calls and not seconds, which depend on the machine: of one batch, from its fetch to its step."""
    run, seen = Training(policy, data=dataset(256), estimator=estimator), []
    ours = os.path.dirname(divebatch.__file__)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            seen.append(frame.f_code.co_name)

    run.epochs(1)
    batches = run.batches()
    for _ in range(4):
        next(batches)
    sys.setprofile(note)
    next(batches)
    sys.setprofile(None)
    assert 5 < len(seen) <= most, seen


# Closing


def test_close_takes_everything_off_and_leaves_the_size_and_the_schedules_rate():
    run = Training(at_once(16), lr_coupling="linear", scheduler=lambda o: StepLR(o, 1))
    run.train()
    run.scheduler.step()
    run.control.step()
    run.control.close()
    assert num_hooks(run.model) == 0
    assert (run.loader.batch_size, run.optimizer.param_groups[0]["lr"]) == (16, pytest.approx(0.001))
    run.train()
    assert num_hooks(run.model) == 0


def test_nothing_holds_on_to_a_closed_controller():
    run = grow(scheduler=lambda o: StepLR(o, 1))
    run.control.close()
    controller = weakref.ref(run.control)
    del run.control
    gc.collect()
    assert controller() is None


def test_a_second_controller_on_a_loader_is_refused_until_the_first_is_closed():
    run = grow()
    with pytest.raises(UsageError, match=r"this loader has a Controller already.* close\(\) the first"):
        Controller(run.model, run.optimizer, run.loader, Fixed())
    (record,) = run.epochs(1)
    assert (record.batch_size, record.next_batch_size) == (4, run.loader.batch_size)
    run.control.close()
    with Controller(run.model, run.optimizer, run.loader, Fixed()) as second:
        run.train()
        assert second.step().epoch == 2


def test_leaving_the_with_block_by_an_error_closes():
    run = grow()
    with pytest.raises(ArithmeticError), run.control:
        raise ArithmeticError
    assert num_hooks(run.model) == 0


def test_step_after_close_gets_an_error():
    run = grow()
    run.train()
    with pytest.warns(UserWarning, match=r"without a call of control\.step"):
        run.control.close()
    with pytest.raises(UsageError, match="close"):
        run.control.step()
    assert run.loader.batch_size == 4


# A pass over the loader between the end of an epoch and step()


@pytest.mark.parametrize(
    "policy", [NoiseDoubling(40), DiveBatch(0.1, 40), Fixed()], ids=lambda policy: type(policy).__name__
)
def test_a_look_at_one_batch_before_the_step_changes_nothing(policy: Policy):
    def record(looks: int) -> EpochRecord:
        run = Training(policy)
        run.train()
        for _ in range(looks):
            next(iter(run.loader))
        return run.control.step()

    assert record(looks=2) == record(looks=0)


@pytest.mark.parametrize("mistake", ["a forgotten step", "an evaluation"])
def test_a_second_pass_before_the_step_is_questioned_at_its_second_batch(mistake: str):
    run = Training(Fixed())
    run.train()
    if mistake == "an evaluation":
        run.control.step()
        list(run.loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = [len(caught) for _ in run.loader]
    assert seen == [0, *[1] * 9]
    assert re.search(r"control\.step\(\).*full_pass\(\)", str(caught[0].message))
    with pytest.raises(UsageError, match=r"2 epochs have ended.*full_pass\(\)"):
        run.control.step()
