"""A run over one pass of text: its parts, its course, its ends, and a resume inside of it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from divebatch.errors import ArgumentError, StoppedError
from divebatch.lab import Experiment, Run, Trainer, execute, get_experiment, make_trainer
from divebatch.lab.schema import Part
from lab.data.text_files import write_corpus
from lab.helpers import StopAfter, assert_same_end, records

TINY = {"layers": 1, "width": 16, "heads": 2, "sequence_length": 16}


def language_model(**end: Any) -> Experiment:
    """With a model so small that a step takes a millisecond; `noise-doubling-8` decides every four steps."""
    experiment = get_experiment("lm-bytes")
    methods = dict(experiment.methods)
    auto = Part(kind="noise-doubling", settings={"max_batch_size": 16, "step_cost": 1e6})
    methods["noise-doubling-8"] = replace(methods["noise-doubling-8"], every_steps=4, policy=auto)
    model = Part(kind="gpt-tiny", settings=TINY)
    return replace(experiment, model=model, methods=methods, **end).with_training(precision="fp32")


@pytest.fixture
def data(tmp_path) -> Path:
    return write_corpus(tmp_path / "data")


def seen_in(trainer: Trainer) -> tuple[list[int], list[float], list[int]]:
    """The samples that a run trains on, and the rate and the first sample's number of each step."""
    numbers, rates, starts = [], [], []
    loader = trainer.control.loader
    fetch = loader.transform

    def noted(batch):
        numbers.extend(batch[0].tolist())
        return fetch(batch)

    loader.transform = noted
    trainer.optimizer.register_step_pre_hook(lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    trainer.optimizer.register_step_pre_hook(lambda *_: starts.append(loader.samples_delivered))
    while trainer.length.done < trainer.length.parts:
        trainer.run_epoch()
    return numbers, rates, starts


@pytest.mark.parametrize("method", ["fixed-8", "noise-doubling-8", "fixed-64"])
def test_a_pass_trains_on_each_sample_once_and_ends_at_the_schedules_floor(tmp_path, data, method):
    trainer = make_trainer(Run(language_model().scaled(4), method, 0, tmp_path, data_dir=data))
    numbers, rates, seen = seen_in(trainer)
    total = len(trainer.control.loader.dataset)
    assert Counter(numbers) == Counter(range(total))
    size = trainer.control.loader.batch_size
    grown = (size / int(method.split("-")[-1])) ** 0.5
    base = language_model().method(method).lr
    assert rates[-1] == pytest.approx(0.1 * base * grown, rel=1e-6)
    assert (size > 8) == (method != "fixed-8")
    warming = [(rate, after / total) for rate, after in zip(rates, seen, strict=True) if after < 0.02 * total]
    assert [rate for rate, _ in warming] == pytest.approx([base * done / 0.02 for _, done in warming])


def test_every_batch_size_has_the_same_course(tmp_path, data):
    courses = {}
    for method in ("fixed-8", "fixed-64"):
        trainer = make_trainer(Run(language_model(), method, 0, tmp_path, data_dir=data))
        base = language_model().method(method).lr
        _, rates, seen = seen_in(trainer)
        courses[method] = dict(zip(seen, (rate / base for rate in rates), strict=True))
    common = courses["fixed-8"].keys() & courses["fixed-64"].keys()
    assert len(common) >= 8
    for place in common:
        assert courses["fixed-8"][place] == pytest.approx(courses["fixed-64"][place])


def test_a_pass_has_forty_records_at_equal_parts_and_no_accuracy(tmp_path):
    data = write_corpus(tmp_path / "data", train=250)
    run = Run(language_model(), "noise-doubling-8", 0, tmp_path, data_dir=data)
    execute(run)
    lines = records(run)
    total = lines[-1]["samples"]
    assert [line["epoch"] for line in lines] == list(range(1, 41))
    for line in lines:
        assert 0 <= line["samples"] - line["epoch"] * total / 40 < 64
        assert line["val_accuracy"] is None
        assert line["bits_per_byte"] == pytest.approx(line["val_loss"] / 0.6931471805599453)
    assert any(line["changes"] for line in lines)
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
    assert run.header().metric.name == "bits_per_byte"


def test_a_batch_larger_than_a_part_carries_the_run_over_several(tmp_path, data):
    run = Run(language_model(), "fixed-256", 0, tmp_path, data_dir=data)
    execute(run)
    epochs = [line["epoch"] for line in records(run)]
    assert len(epochs) == records(run)[-1]["steps"]
    assert epochs[-1] == 40
    assert all(before < after for before, after in pairwise(epochs))
    execute(run, resume=True)  # it is complete
    assert [line["epoch"] for line in records(run)] == epochs


def test_the_late_switch_is_at_three_quarters_of_the_run(tmp_path, data):
    experiment = language_model(samples=400).scaled(8)
    methods = {"late-switch": replace(experiment.method("late-switch"), every_steps=1)}
    run = Run(replace(experiment, methods=methods), "late-switch", 0, tmp_path, data_dir=data)
    execute(run)
    assert [(line["samples"] >= 300, line["next_batch_size"]) for line in records(run)] == [(False, 16)] * 5 + [
        (True, 40)
    ] * 3
    assert records(run)[-1]["samples"] == 400


# Ends


def test_more_samples_than_there_are_need_to_be_asked_for(tmp_path, data):
    run = Run(language_model(samples=1500), "fixed-64", 0, tmp_path, data_dir=data)
    with pytest.raises(ArgumentError, match=r"samples=1500 are more than the \d+ training samples .* repeat=True"):
        make_trainer(run)
    trainer = make_trainer(replace(run, experiment=replace(run.experiment, repeat=True)))
    numbers, rates, _ = seen_in(trainer)
    total = len(trainer.control.loader.dataset)
    assert len(numbers) == 1500
    assert sorted(numbers[:total]) == sorted(numbers[total : 2 * total]) == list(range(total))
    assert numbers[:total] != numbers[total : 2 * total]
    assert rates[-1] == pytest.approx(0.1 * 1.414e-3)


class SteadyClock:
    """A sample takes a hundredth of a second."""

    def __init__(self, trainer: Trainer) -> None:
        self.loader = trainer.control.loader

    @property
    def train_seconds(self) -> float:
        return self.loader.samples_delivered / 100


@pytest.mark.parametrize("repeat", [False, True])
def test_a_run_ends_after_the_seconds_it_was_told_and_the_schedule_with_it(tmp_path, data, repeat):
    seconds = 10.0 if repeat else 3.0
    experiment = language_model(seconds=seconds, repeat=repeat)
    trainer = make_trainer(Run(experiment, "fixed-8", 0, tmp_path, data_dir=data))
    trainer.length.clock = SteadyClock(trainer)
    numbers, rates, _ = seen_in(trainer)
    assert len(numbers) == pytest.approx(100 * seconds, abs=8)
    assert rates[-1] == pytest.approx(0.1 * 5e-4, rel=0.02)
    assert trainer.control.epoch >= 30


def test_a_pass_that_is_over_before_the_seconds_are_ends_the_run_at_the_floor(tmp_path, data):
    trainer = make_trainer(Run(language_model(seconds=3600.0), "fixed-8", 0, tmp_path, data_dir=data))
    trainer.length.clock = SteadyClock(trainer)
    numbers, rates, _ = seen_in(trainer)
    assert sorted(numbers) == list(range(len(trainer.control.loader.dataset)))
    assert rates[-1] == pytest.approx(0.1 * 5e-4)


def test_an_experiment_of_epochs_ends_by_epochs():
    for end in ({"samples": 10}, {"seconds": 1.5}):
        with pytest.raises(ArgumentError, match=r"cifar10 goes over its data 200 times and ends by epochs, not by s"):
            replace(get_experiment("cifar10"), **end)
    with pytest.raises(ArgumentError, match=r"repeat=True needs an end"):
        replace(get_experiment("lm-bytes"), repeat=True)
    with pytest.raises(ArgumentError, match=r"samples: must be greater than or equal to 1"):
        get_experiment("lm-bytes", ["samples=0"])


# Resuming inside of a pass


@pytest.mark.parametrize("steps", [1, 17])
def test_stopped_inside_of_a_pass_it_resumes_to_the_same_bits(tmp_path, data, steps):
    whole = Run(language_model().scaled(4), "noise-doubling-8", 0, tmp_path / "whole", data_dir=data)
    execute(whole)
    assert any(line["changes"] for line in records(whole))
    broken = replace(whole, folder=tmp_path / "broken")
    with pytest.raises(StoppedError):
        execute(broken, stop=StopAfter(steps))
    execute(broken, resume=True)
    assert_same_end(broken, whole)
