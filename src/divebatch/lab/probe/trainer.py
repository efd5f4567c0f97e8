"""Branches of one of our own runs."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from divebatch.data import AdaptiveLoader
from divebatch.data.micro_batches import BatchPlan
from divebatch.data.order import mixed_seed
from divebatch.errors import CheckpointError
from divebatch.lab.experiments import Run, make_trainer
from divebatch.lab.experiments.datasets.dataset import InParts
from divebatch.lab.probe.checkpoints import Start
from divebatch.lab.probe.judge import Judge
from divebatch.lab.probe.rest_of_pass import RestOfPass
from divebatch.lab.probe.verdict import Branch
from divebatch.lab.training import Trainer, evaluate
from divebatch.lab.training.device_options import device_settings
from divebatch.lr import require_adam, scale_settings

DROPOUT = (0, 6)
"""The purpose of a branch's random numbers beside its order."""
EPOCHS_A_REPEAT = 1_000_000
"""Repeats see the order and augmentation of epochs this far apart, which no run reaches."""


class BranchTrainer:
    """A run's trainer at a checkpoint, without its controller: batch size and learning rate are the branch's.

    The learning rate stays what it is at the checkpoint times the branch's factor; schedules stand still. Batches of
    another size, at the end of an epoch, are left out: at the rate of a long batch a short one says nothing. A run over
    one pass goes on with what is left of it.
    """

    def __init__(self, run: Run, start: Start, judge: Judge | None = None) -> None:
        self.run, self.start = run, start
        self.judge = judge or Judge("train", start.header.metric)
        self.trainer: Trainer = make_trainer(run)
        # Batch size and learning rate must be the branch's alone.
        self.trainer.control.close()
        _require_same_data(start, self.trainer.data_fingerprint)
        try:
            self.restore(start.state)
        except (RuntimeError, ValueError) as error:  # of other shapes
            raise CheckpointError(f"'{start.path}' does not fit its run: {error}") from error
        self._state = self.save()
        self.loader: AdaptiveLoader = self.trainer.control.loader
        """The loader of the training data."""
        self.rest: RestOfPass | None = None
        """Of a run over one pass, what is left of it."""
        if run.experiment.one_pass:
            data = InParts(self.loader.dataset, self.loader.transform)
            self.rest = RestOfPass(data.size, run.seed, start.samples)
            self.loader = data(start.batch_size, seed=run.seed, sampler=self.rest)

    @property
    def dataset_size(self) -> int:
        """Samples of a whole pass."""
        size = self.loader.dataset_size
        assert size is not None  # our datasets are no streams
        return size

    @property
    def lr(self) -> float:
        """The learning rate at the checkpoint, of the first parameter group."""
        return float(self._state["optimizer"]["param_groups"][0]["lr"])

    def require_coupling(self, coupling: str | float) -> None:
        """Raise if the run's optimizer cannot follow the batch size by it."""
        if coupling == "adam":
            require_adam(self.trainer.optimizer)

    def save(self) -> dict[str, Any]:
        """Weights, statistics and the optimizer's memory."""
        trainer = self.trainer
        return copy.deepcopy({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `save` gave, which stays as it is."""
        self.trainer.model.load_state_dict(state["model"])
        # A copy: an optimizer works on with the very tensors that it is given, and the next branch needs them too.
        self.trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def train(self, branch: Branch) -> list[float]:
        """Train the branch and return the loss of each step, in the judge's unit."""
        trainer, loader = self.trainer, self.loader
        # By repeat and not by branch: branches of a repeat are compared in pairs.
        torch.manual_seed(mixed_seed(self.run.seed, *DROPOUT, branch.repeat))
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] * branch.lr_factor
        if branch.coupling == "adam":
            scale_settings(trainer.optimizer, branch.factor)
        loader.batch_size = branch.batch_size
        trainer.model.train()
        step = trainer.step.under(BatchPlan)
        with device_settings(trainer.options.precision, trainer.clock.device):
            batches = islice(self._full_batches(branch), branch.steps)
            losses = [step(batch).clone() for batch in batches]  # a replayed pass writes its loss to one place
        return [self.judge.of_loss(float(loss)) for loss in torch.stack(losses).tolist()]

    def evaluate(self) -> float:
        """What the weights as they are make of the validation data, as the judge sees it."""
        trainer = self.trainer
        with device_settings(trainer.options.precision, trainer.clock.device):
            seen = evaluate(trainer.model, trainer.validation, trainer.task, precision=trainer.options.precision)
        return self.judge.of(seen)

    def first_epoch(self, repeat: int) -> int:
        """The loader's epoch that a repeat begins with; repeat 0 goes on as the run itself would."""
        return repeat if self.rest is not None else self.start.epoch + repeat * EPOCHS_A_REPEAT

    def _full_batches(self, branch: Branch) -> Iterator[Any]:
        epoch = self.first_epoch(branch.repeat)
        while True:
            self.loader.set_epoch(epoch)
            yield from (batch for batch in self.loader if _length(batch) == branch.batch_size)
            epoch += 1


def _require_same_data(start: Start, here: str) -> None:
    """Raise where a branch would go on with other data than its run: the checkpoint says by which it was made."""
    there = start.state["run"]["data"]
    if there != here:
        raise CheckpointError(
            f"'{start.path}' was trained on other data than those in the data folder (their hash is {there} there and "
            f"{here} here): give the folder that the run was started with"
        )


def _length(batch: Any) -> int:
    targets: Tensor = batch[1]
    return len(targets)
