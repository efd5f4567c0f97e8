"""A run's checkpoint with one odd field is refused by name before anything is changed, or the run goes on from it."""

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from divebatch.errors import CheckpointError, DivergedError
from divebatch.lab.experiments import Run, execute, make_trainer
from divebatch.lab.experiments.identity import without_identity
from divebatch.lab.experiments.schema import Part
from divebatch.lab.training import load_checkpoint
from divebatch.lab.training.trainer import Trainer
from lab.experiments.small_experiment import small
from reference.edited_states import Edit, edits

ALWAYS_ODD = {"gone", "a word", "a list", "a table", "one more key", "NaN", "another shape"}
PARTS = {
    "sgd": (Part(kind="sgd", settings={"momentum": 0.9}), Part(kind="milestones", settings={"factor": 0.5})),
    "adamw": (Part(kind="adamw"), Part(kind="cosine", settings={"over_epochs": 4})),
}


@pytest.mark.parametrize(("optimizer", "schedule"), PARTS.values(), ids=PARTS)
def test_an_odd_field_is_named_or_the_run_goes_on(tmp_path, monkeypatch, optimizer, schedule):
    monkeypatch.setattr("divebatch.lr.rates.require_all_schedulers", lambda *_: None)  # it looks at all objects
    run = Run(replace(small(), epochs=1, optimizer=optimizer, schedule=schedule), "divebatch", 0, tmp_path)
    execute(run)
    state = without_identity(load_checkpoint(run.checkpoint_path, device=torch.device("cpu")))
    trainer, accepted = make_trainer(run), dict[str, Edit]()
    for edit in edits({name: part for name, part in state.items() if name != "control"}):  # which has its own test
        message = refusal(trainer, edit.applied(state))
        if message:
            assert edit.place.rpartition(".")[0] in message, edit
        else:
            accepted[edit.what] = edit
            go_on(trainer)
            trainer = make_trainer(run)
    assert not [str(edit) for what, edit in accepted.items() if what in ALWAYS_ODD]
    assert "one more" in accepted  # or nothing was loaded at all


def refusal(trainer: Trainer, state: Any) -> str:
    """The error's message, after which the weights must be as before; empty where the state was loaded."""
    before = copy.deepcopy(trainer.model.state_dict())
    try:
        trainer.load_state_dict(state)
    except CheckpointError as error:
        assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))
        return str(error)
    return ""


def go_on(trainer: Trainer) -> None:
    """An epoch; with an absurd rate it may diverge, which is said."""
    with trainer.control, suppress(DivergedError):
        trainer.run_epoch()
