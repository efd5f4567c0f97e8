"""Lightning: callbacks that let a policy set the training's batch size, and that log the noise scale."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from divebatch.checks import warn_user
from divebatch.controller import Controller, require_step_cadence
from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import EpochProgress
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation_policies import InMultiples, refuse_loss
from divebatch.integrations.lightning_checks import (
    check_accumulation,
    check_epochs,
    check_optimizer,
    check_unchanged,
)
from divebatch.integrations.lightning_noise import NoiseScaleCallback
from divebatch.integrations.lightning_package import LightningCallback
from divebatch.integrations.pass_count import PassCount
from divebatch.integrations.step_budget import StepBudget
from divebatch.integrations.step_passes import StepPasses, deliver_in_passes, load_state, state_of
from divebatch.lr import Coupling, Unit
from divebatch.norms.loss_scale import LossReduction
from divebatch.policies import Policy
from divebatch.records import EpochRecord

__all__ = ["BatchSizeCallback", "NoiseScaleCallback"]


class BatchSizeCallback(LightningCallback):  # type: ignore[misc]
    """Gives the training the batch size that `policy` asks for, and lets the learning rate follow it.

    Pass the same `loader` to the trainer, and let it look at the loader's length anew each epoch:

        loader = AdaptiveLoader(dataset, batch_size=128)
        callback = BatchSizeCallback(loader, Auto(max_batch_size=4096))
        trainer = Trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, loader)

    With `every_steps=`, with `Trainer(accumulate_grad_batches=...)`, or with a loader that has a `delivery_size`, a
    backward pass keeps its samples, and memory what it takes: the number of passes that make an optimizer step changes,
    and the policy's sizes are those of a step, in multiples of a pass. Several processes share each batch, whose size
    is that of all together.

    `Trainer(max_steps=N)` trains on as many samples as N steps of the first batch size hold, and schedulers with
    `interval="step"` go by samples too: a schedule of `trainer.estimated_stepping_batches` steps reaches its end.

    Each epoch's record is in `records`; its batch size and diversity go to the trainer's loggers. Checkpoints hold the
    whole state, also in the middle of an epoch.

    Args:
        loader: The `AdaptiveLoader` that the trainer is given too.
        policy: The rule that sets its batch size.
        estimator: What measures the gradients, a name or an object; None for the policy's own.
        lr_coupling: How the learning rate follows the batch size; None for the policy's own, "none" where it has none.
        loss_reduction: How the loss of each backward pass is reduced over its batch, "mean" or "sum".
        every_steps: Decide also within epochs, after each so many optimizer steps; None for the ends of epochs alone.
        accumulate: The batches that one optimizer step takes if the module optimizes by itself and adds up gradients.
    """

    def __init__(
        self,
        loader: AdaptiveLoader,
        policy: Policy,
        *,
        estimator: str | Estimator | None = None,
        lr_coupling: Coupling | None = None,
        loss_reduction: LossReduction = "mean",
        every_steps: int | None = None,
        accumulate: int = 1,
    ) -> None:
        if not isinstance(loader, AdaptiveLoader):
            raise ArgumentError(
                f"loader must be an AdaptiveLoader, got {type(loader).__name__}; "
                f"for a DataLoader: AdaptiveLoader.wrap(dataloader), also for trainer.fit"
            )
        refuse_loss(policy)
        if every_steps is not None:
            require_step_cadence(every_steps, policy, None)
        self.loader, self.policy = loader, policy
        self._estimator = estimator
        self._settings: dict[str, Any] = {
            "lr_coupling": lr_coupling,
            "loss_reduction": loss_reduction,
            "every_steps": every_steps,
            "accumulate": accumulate,
        }
        self.control: Controller | None = None
        self.records: list[EpochRecord] = []
        self._is_fitting, self._is_resumed, self._has_warned = False, False, False
        self._to_load: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._position: dict[str, Any] = {}
        self._num_passes: int = 1
        self._logged: int | None = None
        """The batch size that loggers know."""
        self._passes: StepPasses | None = None
        self._budget: StepBudget | None = None
        self._uncut: int | None = None
        """The batch size that the last step of all was cut from."""
        self._undo: list[Callable[[], None]] = []

    # From the start of fit to its end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Nothing exists yet; what the module asks for its schedulers' lengths must be right from here on."""
        if stage != "fit":
            return
        passes = trainer.accumulate_grad_batches
        is_told = self._settings["every_steps"] is not None or self.loader.delivery_size is not None
        if is_told or passes != 1:
            check_accumulation(trainer, pl_module)
            if self.control is None:
                deliver_in_passes(self.loader, passes, "accumulate_grad_batches")
            self._set_passes(trainer, math.ceil(self.loader.batch_size / (self.loader.delivery_size or 1)))
            self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", passes))
        self._num_passes = trainer.accumulate_grad_batches
        check_epochs(trainer, in_passes=self.loader.delivery_size is not None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizer and schedulers exist now, the loader has not been asked for a batch yet."""
        if self.control is not None and not self._to_load:
            raise UsageError("this callback has been through a fit already: make a new one, or pass ckpt_path to fit")
        check_optimizer(trainer)
        delivered, configs = self.loader.delivery_size, trainer.lr_scheduler_configs
        self.control = control = Controller(
            pl_module,
            trainer.optimizers[0],
            self.loader,
            self.policy if delivered is None else InMultiples(self.policy, delivered),
            estimator=self._estimator,
            grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            scheduler=[config.scheduler for config in configs],
            scheduler_unit=[_unit_of(config) for config in configs],
            **self._settings,
        )
        self._is_fitting, self._is_resumed = True, False
        if (steps := trainer.max_steps) != -1 and not trainer.fast_dev_run:
            self._budget = StepBudget(steps, lambda: control.first_batch_size, self.loader)
            self._undo.append(lambda: _set_max_steps(trainer, steps))
        self._listen(trainer)
        if self._to_load:
            self.load_state_dict(self._to_load)

    def _listen(self, trainer: Any) -> None:
        """After the controller, which may decide on another size when the loop comes for a batch."""
        assert self.control is not None
        if self.loader.delivery_size is not None:
            self._passes = StepPasses(
                self.control,
                lambda count: self._begin_step(trainer, count),
                loss_reduction=self._settings["loss_reduction"],
                samples_left=self._samples_left,
            )
            self._undo.append(self._passes.close)
        elif self._budget is not None:
            self.control.then = self._cut_last_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loader has been asked for, and a checkpoint loaded."""
        if trainer.global_step and not self._is_resumed:
            raise UsageError(
                f"the trainer goes on after step {trainer.global_step}, but its checkpoint has nothing of this "
                f"callback: it was saved without it, or after an error; take another one"
            )
        check_unchanged(trainer, self.loader, self._num_passes)
        if self._is_resumed:
            self._go_on(trainer)

    def _go_on(self, trainer: Any) -> None:
        """Begin where the checkpoint was saved."""
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        # A module that asks for `estimated_stepping_batches` has made the trainer begin a pass before the load, and its
        # own state of the loader wait for the next epoch.
        fit._combined_loader_states_to_load = []
        self.loader.load_state_dict(self._position)
        if not epoch.restarting:  # it takes an epoch that was broken off for done
            self.loader.set_epoch(self.loader.epoch)
        if self._position["pass"] is None:  # with `max_steps` it goes on in an epoch that is over
            epoch.batch_progress.reset_on_run()
        if self._passes is not None:  # a step begins here
            self._set_passes(trainer, self._num_passes, first=fit.batch_idx + 1)
        is_last = epoch.restarted_on_train_batch_end and epoch.batch_progress.is_last_batch
        if fit.restarted_mid_epoch and is_last:
            # Saved after an epoch's last batch: Lightning goes on with the next epoch and leaves out the end of this.
            self._end_epoch(trainer)
            # Else it would take the batches that were made for some of the next epoch, if that has more.
            epoch.batch_progress.current.completed += len(self.loader)
        iter(fit._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Another epoch, and what other callbacks and the module's hooks made of it."""
        check_unchanged(trainer, self.loader, self._num_passes)

    # One optimizer step

    def _begin_step(self, trainer: Any, count: int) -> None:
        """So many passes make the step that begins."""
        check_unchanged(trainer, self.loader, self._num_passes)
        self._set_passes(trainer, count, first=trainer.fit_loop.batch_idx + 1)
        if self._logged not in (None, self.loader.batch_size):  # decided since the last step
            for logger in trainer.loggers:
                logger.log_metrics({"divebatch/batch_size": float(self.loader.batch_size)}, step=trainer.global_step)
        self._logged = self.loader.batch_size

    def _set_passes(self, trainer: Any, count: int, *, first: int = 0) -> None:
        self._num_passes = trainer.accumulate_grad_batches = PassCount(count, before=first)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Lightning has divided the loss by the number of passes."""
        if self._passes is not None:
            self._passes.weigh(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Samples decide when `max_steps` is reached."""
        if self._budget is None:
            return
        is_spent = self._budget.samples_left() == 0
        current = self.loader.current
        if is_spent and self._uncut is not None and current is not None:
            current.resize(self._uncut)  # a later fit that is given more steps goes on with it
        _set_max_steps(trainer, trainer.global_step if is_spent else max(self._budget.steps, trainer.global_step + 1))

    def _samples_left(self) -> float:
        return math.inf if self._budget is None else self._budget.samples_left()

    def _cut_last_step(self, current: EpochProgress) -> None:
        """The last step holds what is left, like an epoch's last one; the size that policies know stays."""
        left = self._samples_left()
        if 0 < left < current.batch_size:
            self._uncut = current.batch_size
            current.resize(max(int(left), self.loader.ranks.size))

    # An epoch's end, and that of fit

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure, decide, apply. Lightning steps epoch schedulers before and saves checkpoints after this."""
        if self.control is None or trainer.fast_dev_run or not trainer.is_last_batch:
            return  # stopped in the middle of an epoch: by max_steps, max_time, early stopping
        check_unchanged(trainer, self.loader, self._num_passes)  # by callbacks that came after this one
        record = self._end_epoch(trainer)
        values = {"batch_size": record.batch_size, "diversity": record.diversity, "lr": record.lr}
        known = {f"divebatch/{name}": float(value) for name, value in values.items() if value is not None}
        pl_module.log_dict(known, sync_dist=trainer.world_size > 1)

    def _end_epoch(self, trainer: Any) -> EpochRecord:
        assert self.control is not None
        record = self.control.step()
        micro_batch_size = record.micro_batch_size or self.loader.delivery_size or record.batch_size
        self.records.append(replace(record, steps=trainer.global_step, micro_batch_size=micro_batch_size))
        return self.records[-1]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls this and not `teardown` when something fails."""
        self._leave(keep_state=trainer.world_size == 1)  # a state of all ranks cannot be had from one that failed

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fit is over."""
        self._leave()

    def _leave(self, *, keep_state: bool = True) -> None:
        """Take every hook off the model again; checkpoints written later hold the state of now."""
        if self._is_fitting and self.control is not None:
            with suppress(UsageError):  # an epoch whose step() failed has no state to go on from
                self._last = state_of(self.control) if keep_state else {}
            self._is_fitting = False
            self.control.close()
        while self._undo:
            self._undo.pop()()
        self._passes = self._budget = None

    # State

    def state_dict(self) -> dict[str, Any]:
        """The controller's state; the loader's position and an epoch's sums are in it."""
        if not self._is_fitting:
            return self._last
        if self._passes is not None and self._passes.is_within_step and not self._has_warned:
            self._has_warned = True
            warn_user(
                "a checkpoint is saved between the passes of an optimizer step: a resume goes on without the gradients "
                "of those that were made. Save between steps, as ModelCheckpoint(every_n_train_steps=...) does"
            )
        assert self.control is not None
        return state_of(self.control)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning loads callbacks before there is an optimizer, or, for some strategies, after `on_fit_start`."""
        self._to_load = state_dict
        if self.control is None or not self._is_fitting or not state_dict:
            return
        load_state(self.control, state_dict)
        self._to_load, self._is_resumed, self._position = {}, True, state_dict["loader"]


def _unit_of(config: Any) -> Unit:
    """Return what a step of a scheduler means by its `interval`."""
    if config.interval == "epoch" or config.reduce_on_plateau:
        return "epoch" if config.interval == "epoch" else "call"
    return "step" if config.frequency == 1 else "call"


def _set_max_steps(trainer: Any, steps: int) -> None:
    trainer.fit_loop.epoch_loop.max_steps = steps
