"""The Hugging Face adapter by steps: a length in samples, decisions within epochs, checkpoints at any step."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from divebatch import Decision, Fixed, Measurement, Policy
from divebatch.errors import ArgumentError, CheckpointError
from integrations.plain_loop import GROWS_AND_SHRINKS, Course, each_once
from integrations.trainer_runs import NUMBERED, Regression, adapter, gpt2, plain_course, sentences, trainer
from integrations.trainer_runs import transformers as hf

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


@dataclass(frozen=True)
class InTurn(Course):
    """The sizes of one decision after the other, within epochs."""

    decides_within_epochs: ClassVar[bool] = True

    def next(self, seen: Measurement) -> Decision:
        place = self.sizes.index(seen.batch_size)
        return Decision(batch_size=self.sizes[(place + 1) % len(self.sizes)])


@dataclass(frozen=True)
class ByEveryDigit(Policy):
    """Any other bit of what is measured gives another course."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})
    decides_within_epochs: ClassVar[bool] = True

    def next(self, seen: Measurement) -> Decision:
        assert seen.diversity is not None
        digits = int(seen.diversity.sum_of_sq_norms * 1e7)
        return Decision(batch_size=4 + 2 * (digits % 5))


def sizes_of(run: Any) -> list[int]:
    return [entry["batch_size"] for entry in run.state.log_history if "loss" in entry]


def assert_same_weights(first: Any, second: Any) -> None:
    for here, there in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(here, there)


# The length, in samples


@pytest.mark.parametrize("length", [{"max_steps": 20}, {"num_train_epochs": 2.5}], ids=["max_steps", "epochs"])
def test_the_length_is_that_of_the_first_steps_in_samples_and_the_schedule_ends_with_it(length, tmp_path):
    """Two epochs of eight steps, and four: 48 + 48 + 24 samples."""
    run = trainer(Course((6, 12, 20)), tmp_path, lr_scheduler_type="linear", logging_strategy="steps", **length)
    run.args.logging_steps = 1
    run.train()
    assert len(run.model.seen) == 120
    assert each_once([run.model.seen[:48], run.model.seen[48:96]])
    assert sizes_of(run) == [6] * 8 + [12] * 4 + [20] * 2  # of 20 and 4 samples
    assert run.state.global_step == run.state.max_steps == 14
    assert run.optimizer.param_groups[0]["lr"] == 0.0
    assert run.state.epoch == 2.5


def test_a_size_that_stays_is_the_plain_trainers_course(tmp_path):
    """With its steps and its rates; only the order of the samples is ours."""
    settings: dict[str, Any] = {"lr_scheduler_type": "cosine", "warmup_steps": 3, "logging_strategy": "steps"}
    settings |= {"logging_steps": 1, "max_steps": 19, "data": NUMBERED[:46]}
    run = trainer(Fixed(), tmp_path, **settings)
    run.train()
    theirs = hf.Trainer(model=Regression(), args=run.args, train_dataset=settings["data"])
    theirs.train()
    assert len(run.model.seen) == len(theirs.model.seen)
    here, there = ([row for row in each.state.log_history if "loss" in row] for each in (run, theirs))
    assert [row["epoch"] for row in here] == pytest.approx([row["epoch"] for row in there])
    # Samples drive ours, and an epoch's last step has 4 instead of 6: up to a step's change of the schedule.
    assert [row["learning_rate"] for row in here] == pytest.approx([row["learning_rate"] for row in there], abs=0.002)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1),
    first=st.integers(1, 5),
    steps=st.integers(1, 30),
    epoch=st.none() | st.integers(1, 40),
    unit=st.integers(1, 4),
)
def test_steps_that_are_left_are_those_of_a_loop(sizes, first, steps, epoch, unit):
    """A loop that takes the passes of one step after the other, whose size changes, ends when it should."""
    length = adapter.RunLength(first_steps=steps, first_batch_size=first * unit, epoch_samples=epoch, pass_samples=unit)
    assert taken_by_hand(length, [first] * steps)[0] == length.samples
    seen = 0
    for size in sizes + [sizes[-1]] * 200:
        left = length.steps_left(seen, size * unit)
        rest, count = taken_by_hand(length, [size] * 1000, seen=seen)
        assert (rest, count) == (length.samples, left)
        if not left:
            break
        seen, _ = taken_by_hand(length, [size], seen=seen)


def taken_by_hand(length: Any, passes: list[int], *, seen: int = 0) -> tuple[int, int]:
    """Samples after steps of so many passes each, and how many steps that took until nothing was left."""
    steps = 0
    for number in passes:
        before = seen
        for _ in range(number):
            of_epoch = length.samples if length.epoch_samples is None else length.epoch_samples
            in_epoch = seen % of_epoch
            if seen >= length.samples or (seen > before and in_epoch == 0):
                break
            seen += min(length.pass_samples, of_epoch - in_epoch)
        steps += seen > before
    return seen, steps


def test_a_training_that_ends_before_anything_is_decided_says_so(tmp_path):
    run = trainer(Course((6, 12)), tmp_path, max_steps=3)
    with pytest.warns(UserWarning, match=r"this training of 18 samples may end before the first: .*every_steps=N"):
        run.train()


# Within an epoch


@pytest.mark.parametrize("sizes", [(6, 12, 4), (6, 4, 10, 2)], ids=str)
def test_decisions_within_an_epoch_are_those_of_the_plain_loop(sizes, tmp_path):
    run = trainer(InTurn(sizes), tmp_path, every_steps=2, lr_coupling="linear", num_train_epochs=3)
    run.train()
    expected, twin = plain_course(InTurn(sizes), epochs=3, every_steps=2)
    assert [record.changes for record in run.records] == [record.changes for record in expected]
    assert [(r.batch_size, r.steps, r.next_lr) for r in run.records] == [
        (r.batch_size, r.steps, r.next_lr) for r in expected
    ]
    assert all(record.changes for record in expected)
    assert each_once([run.model.seen[start : start + 48] for start in range(0, 3 * 48, 48)])
    for here, there in zip(run.model.net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_callbacks_see_each_step_as_it_is(tmp_path):
    class Watch(hf.TrainerCallback):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
            self.events.append(("begin", args.gradient_accumulation_steps))

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.events.append("pass")

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.events.append(("end", round(state.epoch * 48)))

    watch = Watch()
    trainer(InTurn((6, 4)), tmp_path, every_steps=1, num_train_epochs=1, callbacks=[watch]).train()
    steps = [("begin", 3), "pass", "pass", "end", ("begin", 2), "pass", "end"] * 4 + [
        ("begin", 3),
        "pass",
        "pass",
        "end",
    ]
    steps += [("begin", 2), "end"]  # the last pass
    ends = [6, 10, 16, 20, 26, 30, 36, 40, 46, 48]
    assert [event if event != "end" else ("end", ends.pop(0)) for event in steps] == watch.events


# Checkpoints


@pytest.mark.parametrize("model", [gpt2, Regression], ids=["tokens", "samples"])
def test_resumed_from_any_step_it_is_the_whole_run_to_the_bit(model, tmp_path):
    """With dropout, Adam, a schedule and decisions by what is measured; the last step of an epoch is among them."""
    make = (lambda: gpt2(dropout=0.2)) if model is gpt2 else model
    data = sentences(23) if model is gpt2 else NUMBERED[:23]
    settings: dict[str, Any] = {"lr_coupling": "sqrt", "lr_scheduler_type": "cosine", "optim": "adamw_torch"}
    settings |= {"every_steps": 3, "max_steps": 11, "data": data, "logging_strategy": "steps", "logging_steps": 1}
    settings |= {"estimator": "split", "learning_rate": 0.01}
    whole = trainer(ByEveryDigit(), tmp_path, model=make(), save_strategy="steps", save_steps=1, **settings)
    whole.train()
    folders = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    sizes = sizes_of(whole)
    assert len(folders) == whole.state.global_step == len(sizes)
    assert len(set(sizes)) > 1
    for folder in folders[1:-1:2]:
        resumed = trainer(ByEveryDigit(), tmp_path / "resumed", model=make(), **settings)
        resumed.train(resume_from_checkpoint=str(folder))
        assert sizes_of(resumed) == sizes
        assert_same_weights(resumed.model, whole.model)
        assert resumed.records == whole.records[len(whole.records) - len(resumed.records) :]


def test_the_last_complete_checkpoint_is_taken_where_saving_was_cut_off(tmp_path, monkeypatch):
    """As by kill -9: nothing is cleaned up. An explicit folder that is not complete is an error."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "save_total_limit": 1, "policy": Fixed()}
    whole = trainer(folder=tmp_path / "whole", **settings)
    whole.train()
    killed = trainer(folder=tmp_path, **settings)
    monkeypatch.setattr(adapter.torch, "save", Dies(torch.save, after=2))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    monkeypatch.undo()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    with pytest.raises(CheckpointError, match=r"checkpoint-4' has no divebatch.pt"):
        trainer(folder=tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed = trainer(folder=tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed.model, whole.model)


class Dies:
    """The file of the adapter is written in part the second time."""

    def __init__(self, save: Any, *, after: int) -> None:
        self.save, self.left = save, after

    def __call__(self, value: Any, path: Any, *rest: Any, **named: Any) -> None:
        if str(path).endswith("divebatch.pt.part"):
            self.left -= 1
            if not self.left:
                Path(path).write_bytes(b"half")
                raise KeyboardInterrupt
        self.save(value, path, *rest, **named)


def test_no_complete_checkpoint_and_another_first_batch_are_errors(tmp_path):
    trainer(Fixed(), tmp_path, save_strategy="epoch", num_train_epochs=1).train()
    with pytest.raises(CheckpointError, match=r"2 samples a pass and 6 in the first batch, .* 2 and 4: .*_steps=3"):
        trainer(Fixed(), tmp_path, gradient_accumulation_steps=2).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text('{"epoch')
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        trainer(Fixed(), tmp_path).train(resume_from_checkpoint=True)


def test_evaluation_by_steps_and_the_best_model_work_as_always(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "best", "metric_for_best_model": "loss"}
    settings |= {"load_best_model_at_end": True, "eval_dataset": NUMBERED, "every_steps": 2, "estimator": "split"}
    run = trainer(ByEveryDigit(), tmp_path, num_train_epochs=2, **settings)
    run.train()
    evaluated = {row["step"]: row["eval_loss"] for row in run.state.log_history if "eval_loss" in row}
    assert list(evaluated) == [*range(3, run.state.global_step, 3), run.state.global_step]
    best = min(evaluated, key=lambda step: evaluated[step])
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert run.evaluate()["eval_loss"] == pytest.approx(evaluated[best])
    assert each_once([run.model.seen[:48], run.model.seen[48:]])


# Streams


class Stream(IterableDataset[Any]):
    """Numbered samples without a length; a new order each epoch, as Hugging Face's streams have."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERED[(number + self.epoch) % self.size] for number in range(self.size))


@pytest.mark.parametrize("size", [20, 16])
def test_a_stream_is_read_until_the_samples_are_seen_and_resumes_where_it_was(size, tmp_path):
    """Also at its end, which nobody knows before it is asked for more."""
    settings: dict[str, Any] = {"max_steps": 8, "every_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(InTurn((6, 4)), tmp_path, data=Stream(size), **settings)
    whole.train()
    assert len(whole.model.seen) == 48
    assert whole.model.seen[:size] == list(range(size))
    assert whole.model.seen[size : 2 * size] == [*range(1, size), 0]
    for step in (1, 3, 6):  # of 6, 6, 4 ... samples: the third step takes the last of 16
        resumed = trainer(InTurn((6, 4)), tmp_path / "resumed", data=Stream(size), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(resumed.model, whole.model)
        assert whole.model.seen[-len(resumed.model.seen) :] == resumed.model.seen


def test_a_policy_that_decides_by_epochs_is_refused_within_them(tmp_path):
    with pytest.raises(ArgumentError, match="decides after whole epochs"):
        trainer(Course(GROWS_AND_SHRINKS), tmp_path, every_steps=2).train()
