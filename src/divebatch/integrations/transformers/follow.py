"""The Trainer's events, for a controller."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from divebatch.controller import Controller
from divebatch.integrations.accumulation_policies import InMultiples
from divebatch.integrations.transformers.framework import TrainerCallback


class Follow(TrainerCallback):  # type: ignore[misc]
    """Makes the controller when training begins, and tells it of the ends of epochs.

    Args:
        trainer: The `BatchSizeTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Model, optimizer and scheduler are as they will be, and a checkpoint is loaded into them."""
        trainer = self.trainer
        self._hooks = [
            module.register_forward_pre_hook(self._expand_positions)
            for module in trainer.model.modules()
            if isinstance(module, nn.Embedding)
        ]
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        trainer.batch_control = Controller(
            trainer.model,
            optimizer,
            trainer.train_loader,
            InMultiples(trainer.policy, trainer.train_loader.delivery_size),
            estimator=trainer._estimator,
            grad_scaler=trainer.accelerator.scaler,
            lr_coupling=trainer.lr_coupling,
            scheduler=trainer.lr_scheduler,
            scheduler_unit="call",  # it counts samples by itself
            every_steps=trainer.every_steps,
            loss_reduction="weighted",  # a loss that does not have the weights already is multiplied by the trainer
        )
        if trainer._resume_from is not None:
            trainer.batch_control.load_state_dict(trainer._resume_from)
            trainer._resume_from = None

    def _expand_positions(self, _: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Positions that all samples share are given to each, so that each one's gradient is its own."""
        ids, count = inputs[0], self.trainer._rows_in_pass
        is_shared = ids.ndim == 2 and len(ids) == 1 and count > 1 and torch.is_grad_enabled()
        return (ids.expand(count, -1), *inputs[1:]) if is_shared else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer counts passes from here on, also in an epoch that is resumed in the middle."""
        self.trainer._passes_before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """With its last step an epoch ends, before that step is logged and saved."""
        trainer = self.trainer
        state.epoch = trainer._length.epochs(trainer.train_loader.samples_delivered)
        if trainer.train_loader.is_at_end:
            self._end_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A stream is known to have ended only when it is asked for more."""
        trainer = self.trainer
        if trainer.train_loader.epoch == trainer.batch_control.epoch:
            return
        self._end_epoch(state)
        if trainer._passes_before == 0:  # resumed at the stream's end, where the Trainer finds nothing and gives up
            control.should_training_stop = False

    def _end_epoch(self, state: Any) -> None:
        trainer = self.trainer
        record = replace(
            trainer.batch_control.step(), steps=state.global_step, micro_batch_size=trainer.train_loader.delivery_size
        )
        trainer.records.append(record)
        state.log_history.append(
            {"epoch": state.epoch, "step": state.global_step, "batch_size": record.batch_size}
            | ({} if record.diversity is None else {"diversity": record.diversity})
        )

    def leave(self) -> None:
        """Take every hook off the model again."""
        if self.trainer.batch_control is not None:
            self.trainer.batch_control.close()
        while self._hooks:
            self._hooks.pop().remove()
