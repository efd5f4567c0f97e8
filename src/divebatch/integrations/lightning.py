"""Lightning: a callback that lets a policy set the training loader's batch size after each epoch.

It works with `lightning.pytorch` and with `pytorch_lightning`, which are different packages with the same classes.
"""

from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor

from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation_policies import refuse_loss
from divebatch.integrations.versions import Requirement
from divebatch.lr import Coupling
from divebatch.norms.loss_scale import LossReduction, LossWeight
from divebatch.policies import Policy
from divebatch.records import EpochRecord
from divebatch.resolve import Trained, resolve_estimator

REQUIREMENT = Requirement(
    ["lightning", "pytorch-lightning"],
    extra="lightning",
    oldest="2.6.6",
    too_new="2.7",
    excluded=["2.6.2", "2.6.3"],  # these two carried malware
)
_MODULES = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
_CALLBACKS = tuple(import_module(_MODULES[package]).Callback for package in REQUIREMENT.installed())
_Callback: Any = type("_Callback", _CALLBACKS, {})


class BatchSizeCallback(_Callback):  # type: ignore[misc]
    """Gives `loader` the batch size that `policy` asks for, and lets the learning rate follow it.

    Pass the same `loader` to the trainer, and let it look at the loader's length anew each epoch:

        loader = AdaptiveLoader(dataset, batch_size=128)
        callback = BatchSizeCallback(loader, Auto(max_batch_size=4096))
        trainer = Trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, loader)

    With `accumulate_grad_batches=k` the policy's sizes are those of an optimizer step: k of the loader's batches.
    Several processes share each batch, whose size is that of all together.

    Each epoch's record is in `records`; its batch size and diversity go to the trainer's loggers. Checkpoints hold the
    whole state, also in the middle of an epoch; an epoch that `max_steps` broke off starts again.

    Args:
        loader: The `AdaptiveLoader` that the trainer is given too.
        policy: The rule that sets its batch size.
        estimator: What measures the gradients, a name or an object; None for the policy's own.
        lr_coupling: How the learning rate follows the batch size; None for the policy's own, "none" where it has none.
        loss_reduction: How the loss of each backward pass is reduced over its batch, "mean" or "sum".
        step_schedule: Whether a scheduler that Lightning steps after every batch is taken: only if it does not
            rely on the number of batches, which changes.
    """

    def __init__(
        self,
        loader: AdaptiveLoader,
        policy: Policy,
        *,
        estimator: str | Estimator | None = None,
        lr_coupling: Coupling | None = None,
        loss_reduction: LossReduction = "mean",
        step_schedule: bool = False,
    ) -> None:
        if not isinstance(loader, AdaptiveLoader):
            raise ArgumentError(
                f"loader must be an AdaptiveLoader, got {type(loader).__name__}; "
                f"for a DataLoader: AdaptiveLoader.wrap(dataloader), also for trainer.fit"
            )
        refuse_loss(policy)
        self.loader, self.policy, self.step_schedule = loader, policy, step_schedule
        self._estimator = estimator
        self._settings: dict[str, Any] = {"lr_coupling": lr_coupling, "loss_reduction": loss_reduction}
        self.control: Controller | None = None
        self.records: list[EpochRecord] = []
        self._is_fitting, self._is_resumed = False, False
        self._to_load: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._num_passes = 1

    # From the start of fit to its end

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizer and schedulers exist now, the loader has not been asked for a batch yet."""
        if self.control is not None and not self._to_load:
            raise UsageError("this callback has been through a fit already: make a new one, or pass ckpt_path to fit")
        _check_epochs(trainer)
        _check_optimizer(trainer, self.step_schedule)
        self._num_passes = trainer.accumulate_grad_batches
        self.control = Controller(
            pl_module,
            trainer.optimizers[0],
            self.loader,
            self.policy,
            estimator=resolve_estimator(
                self.policy,
                self._estimator,
                Trained(pl_module, trainer.optimizers, self.loader),
                grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            ),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            batches_per_step=self._num_passes,
            schedule_in="calls",  # what is stepped after every batch was said not to rely on their number
            **self._settings,
        )
        self._is_fitting, self._is_resumed = True, False
        if self._to_load:
            self.load_state_dict(self._to_load)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loader has been asked for, and a checkpoint loaded."""
        if trainer.global_step and not self._is_resumed:
            raise UsageError(
                f"the trainer goes on after step {trainer.global_step}, but its checkpoint has nothing of this "
                f"callback: it was saved without it, or after an error; take another one"
            )
        self._check_unchanged(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Another epoch, and what other callbacks and the module's hooks made of it."""
        self._check_unchanged(trainer)

    def _check_unchanged(self, trainer: Any) -> None:
        if trainer.train_dataloader is not self.loader:
            raise ArgumentError(
                f"the trainer's loader is a {type(trainer.train_dataloader).__name__} and not the callback's: pass the "
                f"callback's loader to fit, or return that very object from train_dataloader() each time"
            )
        if trainer.accumulate_grad_batches != self._num_passes:
            raise ArgumentError(
                f"accumulate_grad_batches went from {self._num_passes} to {trainer.accumulate_grad_batches}: "
                f"keep it, and leave the batch size to the policy"
            )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Lightning has divided the loss by the number of passes; norms must know."""
        if self._num_passes > 1:
            LossWeight(1 / self._num_passes).mark(loss)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure, decide, apply. Lightning steps epoch schedulers before and saves checkpoints after this."""
        if self.control is None or trainer.fast_dev_run or not trainer.is_last_batch:
            return  # stopped in the middle of an epoch: by max_steps, max_time, early stopping
        self._check_unchanged(trainer)  # by callbacks that came after this one
        record = self._of_optimizer_steps(self.control.step(), trainer.global_step)
        self.records.append(record)
        values = {"batch_size": record.batch_size, "diversity": record.diversity}
        known = {f"divebatch/{name}": float(value) for name, value in values.items() if value is not None}
        pl_module.log_dict(known, sync_dist=trainer.world_size > 1)

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
                self._last = self.state_dict() if keep_state else {}
            self._is_fitting = False
            self.control.close()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The controller's state; the loader's position and an epoch's sums are in it."""
        return self.control.state_dict() if self.control is not None and self._is_fitting else self._last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning loads callbacks before there is an optimizer, or, for some strategies, after `on_fit_start`."""
        self._to_load = state_dict
        if self.control is not None and self._is_fitting:
            self.control.load_state_dict(state_dict)
            self._to_load, self._is_resumed = {}, True

    def _of_optimizer_steps(self, record: EpochRecord, steps: int) -> EpochRecord:
        return replace(record, steps=steps, micro_batch_size=record.batch_size // self._num_passes)


def _check_epochs(trainer: Any) -> None:
    """Refuse what would end an epoch before all samples were seen, or break it later."""
    if trainer.reload_dataloaders_every_n_epochs != 1:
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}) never learns "
            f"of a new batch size, or drops samples: pass reload_dataloaders_every_n_epochs=1"
        )
    if not trainer.fast_dev_run and (trainer.limit_train_batches != 1.0 or trainer.overfit_batches):
        raise ArgumentError(
            f"limit_train_batches={trainer.limit_train_batches} and overfit_batches={trainer.overfit_batches} end "
            f"an epoch before all samples were seen: train on a Subset instead"
        )
    if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
        raise ArgumentError(
            f"val_check_interval={trainer.val_check_interval} counts batches, and an epoch may come to have fewer: "
            f"use a part of an epoch, such as 0.5"
        )


def _check_optimizer(trainer: Any, step_schedule: bool) -> None:
    """Refuse several optimizers, and schedules whose length is a number of steps."""
    if len(trainer.optimizers) != 1:
        raise ArgumentError(f"one optimizer can be followed, the module has {len(trainer.optimizers)}")
    by_step = [type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs if c.interval == "step"]
    if by_step and not step_schedule:
        raise ArgumentError(
            f"scheduler {by_step[0]} has interval='step', and the number of steps changes with the batch size "
            f"(estimated_stepping_batches does not): use interval='epoch', or pass step_schedule=True if it "
            f"does not depend on the number of steps"
        )
