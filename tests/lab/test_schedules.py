"""Schedules by samples: their courses, and that any experiment may have one."""

import math
from dataclasses import replace

import pytest
import torch

from divebatch.errors import ArgumentError
from divebatch.lab import Run, get_experiment, make_trainer
from divebatch.lab.schedules import SCHEDULES
from divebatch.lab.schema import Part
from lab.small_experiment import small


def test_a_warm_up_leads_to_the_rate_and_a_cosine_to_the_floor():
    course = SCHEDULES["warmup-cosine"](warmup=0.1, floor=0.2).course
    assert [course(x) for x in (0.0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2])
    assert course(0.325) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert SCHEDULES["warmup-cosine"](warmup=0.0).course(0.0) == 1.0


@pytest.mark.parametrize("batch_size", [3, 7, 32])
def test_an_experiment_of_epochs_ends_at_the_floor_whatever_the_size(tmp_path, batch_size):
    experiment = small()
    method = replace(experiment.method("sgd-small"), batch_size=batch_size, lr=0.5)
    schedule = Part(kind="warmup-cosine", settings={"warmup": 0.1, "floor": 0.25})
    planned = replace(experiment, schedule=schedule, methods={"it": method})
    trainer = make_trainer(Run(planned, "it", 0, tmp_path))
    rates, places = [], []
    loader = trainer.control.loader
    trainer.optimizer.register_step_pre_hook(lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    trainer.optimizer.register_step_pre_hook(lambda *_: places.append(loader.samples_delivered))
    for _ in range(planned.epochs):
        trainer.run_epoch()
    course, total = SCHEDULES["warmup-cosine"](warmup=0.1, floor=0.25).course, planned.epochs * len(loader.dataset)
    assert rates[-1] == pytest.approx(0.25 * 0.5)
    # A step that is shorter than the batch size, at an epoch's end, has the rate of a whole one.
    whole = [(r, p) for r, p, before in zip(rates, places, [0, *places], strict=False) if p - before == batch_size]
    assert len(whole) > 3
    assert [rate for rate, _ in whole] == pytest.approx([0.5 * course(place / total) for _, place in whole])


def test_a_step_twice_at_one_place_changes_nothing_and_the_state_is_plain():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    place = [0.01]
    scheduler = SCHEDULES["warmup-cosine"]().build(optimizer, lambda: place[0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    place[0] = 1.0
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert all(isinstance(value, int | float | list | bool | None) for value in scheduler.state_dict().values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, got warmup=1.0"),
        ({"floor": -0.1}, "floor must be at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_an_error(settings, message):
    with pytest.raises(ArgumentError, match=message):
        SCHEDULES["warmup-cosine"](**settings)


def test_warm_ups_by_epochs_are_not_for_a_single_pass():
    experiment = get_experiment("lm-bytes")
    methods = {"it": replace(experiment.method("fixed-8"), warmup_epochs=2)}
    with pytest.raises(ArgumentError, match=r"method it has warmup_epochs, and lm-bytes is one pass: set the schedule"):
        replace(experiment, methods=methods)
