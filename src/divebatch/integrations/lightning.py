"""Lightning: a callback that lets a policy set the batch size, and a callback that logs the noise scale."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from divebatch.checks import require_count, warn_user
from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import EpochProgress
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation import (
    InMultiples,
    PassCount,
    StepBudget,
    StepPasses,
    deliver_in_passes,
    load_state,
    refuse_loss,
    state_of,
)
from divebatch.integrations.versions import require_installed
from divebatch.lr import Coupling, Unit
from divebatch.noise_meter import NoiseMeter, NoiseScale
from divebatch.norms.loss_scale import LossReduction
from divebatch.parts import require_step_cadence
from divebatch.policies import Policy
from divebatch.records import EpochRecord

_MODULES = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
_INSTALLED = require_installed(
    list(_MODULES),
    extra="lightning",
    oldest="2.6.6",
    too_new="2.7",
    excluded=["2.6.2", "2.6.3"],  # these releases contained malware
)
LightningCallback: Any = type(
    "LightningCallback", tuple(import_module(_MODULES[name]).Callback for name in _INSTALLED), {}
)
"""The base class of callbacks for the trainers of all installed packages."""

__all__ = ["BatchSizeCallback", "NoiseScaleCallback"]


class BatchSizeCallback(LightningCallback):  # type: ignore[misc]
    """A callback that lets a policy set the batch size, which the learning rate follows.

    Pass the same `loader` to the trainer, and let the trainer reload it every epoch:

        loader = AdaptiveLoader(dataset, batch_size=128)
        callback = BatchSizeCallback(loader, Auto(max_batch_size=4096))
        trainer = Trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, loader)

    With `every_steps=`, `Trainer(accumulate_grad_batches=...)` or a loader's `delivery_size`, the samples and memory of
    a backward pass stay constant. The number of passes in an optimizer step changes, and the policy's sizes are those
    of a step, in multiples of a pass. Several processes share each batch, and the batch size is that of all together.

    `Trainer(max_steps=N)` trains on the samples of N steps of the first batch size. Samples also drive schedulers with
    `interval="step"`, so a schedule of `trainer.estimated_stepping_batches` steps reaches its end.

    `records` has each epoch's record; the batch size and diversity also go to the trainer's loggers. Checkpoints hold
    the whole state, also in the middle of an epoch.

    Args:
        loader: The `AdaptiveLoader` that is also passed to the trainer.
        policy: The rule that sets the loader's batch size.
        estimator: The estimator of gradient noise, by name or as an object. None: the policy's own.
        lr_coupling: The dependence of the learning rate on the batch size. None: the policy's own, or else "none".
        loss_reduction: The reduction of each backward pass's loss over its batch, "mean" or "sum".
        every_steps: Decide also within an epoch, every N optimizer steps. None: only at the ends of epochs.
        accumulate: Batches per optimizer step if the module itself optimizes and accumulates gradients.
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
        require_step_cadence(every_steps, policy)
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
        """The last logged batch size."""
        self._passes: StepPasses | None = None
        self._budget: StepBudget | None = None
        self._uncut: int | None = None
        """The batch size before the training's last step was cut."""
        self._undo: list[Callable[[], None]] = []

    # The start of fit

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the number of passes, from which the module may compute its schedulers' lengths."""
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
        """Make the controller, now that optimizer and schedulers exist and before the first batch."""
        if self.control is not None and not self._to_load:
            raise UsageError("this callback was already used in a fit: make a new one, or pass ckpt_path to fit")
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
        if delivered is not None:
            self._passes = StepPasses(
                control,
                lambda count: self._begin_step(trainer, count),
                loss_reduction=self._settings["loss_reduction"],
                samples_left=self._samples_left,
            )
            self._undo.append(self._passes.close)
        elif self._budget is not None:
            control.then = self._cut_last_step
        if self._to_load:
            self.load_state_dict(self._to_load)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue from a checkpoint if one was loaded."""
        if trainer.global_step and not self._is_resumed:
            raise UsageError(
                f"the trainer continues after step {trainer.global_step}, but its checkpoint has nothing of this "
                f"callback: it was saved without the callback or after an error; take another checkpoint"
            )
        self._check_unchanged(trainer)
        if self._is_resumed:
            self._resume(trainer)

    def _resume(self, trainer: Any) -> None:
        """Continue where the checkpoint was saved."""
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        # If the module asked for `estimated_stepping_batches`, the trainer began a pass before the load and kept its
        # own state of the loader for the next epoch.
        fit._combined_loader_states_to_load = []
        self.loader.load_state_dict(self._position)
        if not epoch.restarting:  # it counts an interrupted epoch as finished
            self.loader.set_epoch(self.loader.epoch)
        if self._position["pass"] is None:  # with `max_steps` it continues in a finished epoch
            epoch.batch_progress.reset_on_run()
        if self._passes is not None:  # a step begins here
            self._set_passes(trainer, self._num_passes, first=fit.batch_idx + 1)
        is_last = epoch.restarted_on_train_batch_end and epoch.batch_progress.is_last_batch
        if fit.restarted_mid_epoch and is_last:
            # Saved after an epoch's last batch: Lightning begins the next epoch and skips the end of this one.
            self._end_epoch(trainer)
            # Otherwise Lightning would count this epoch's batches for the next epoch, if that has more.
            epoch.batch_progress.current.completed += len(self.loader)
        iter(fit._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that nothing else has changed the loader or the number of passes."""
        self._check_unchanged(trainer)

    def _check_unchanged(self, trainer: Any) -> None:
        """Raise if something else has set the loader or the accumulation."""
        if trainer.train_dataloader is not self.loader:
            raise ArgumentError(
                f"the trainer's loader is a {type(trainer.train_dataloader).__name__} and not the callback's: pass the "
                f"callback's loader to fit, or return this same object from train_dataloader() each time"
            )
        if trainer.accumulate_grad_batches is not self._num_passes:
            raise ArgumentError(
                f"accumulate_grad_batches went from {self._num_passes} to {trainer.accumulate_grad_batches}: "
                f"remove the cause, such as a GradientAccumulationScheduler, and leave the size of a step to the policy"
            )

    # One optimizer step

    def _begin_step(self, trainer: Any, count: int) -> None:
        """Set the number of passes of the next step."""
        self._check_unchanged(trainer)
        self._set_passes(trainer, count, first=trainer.fit_loop.batch_idx + 1)
        if self._logged not in (None, self.loader.batch_size):  # decided since the last step
            for logger in trainer.loggers:
                logger.log_metrics({"divebatch/batch_size": float(self.loader.batch_size)}, step=trainer.global_step)
        self._logged = self.loader.batch_size

    def _set_passes(self, trainer: Any, count: int, *, first: int = 0) -> None:
        self._num_passes = trainer.accumulate_grad_batches = PassCount(count, before=first)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Weight the loss of a pass, which Lightning has divided by the number of passes."""
        if self._passes is not None:
            self._passes.weigh(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Set Lightning's limit of steps so that training ends when all its samples are used."""
        if self._budget is None:
            return
        is_spent = self._budget.samples_left() == 0
        current = self.loader.current
        if is_spent and self._uncut is not None and current is not None:
            current.resize(self._uncut)  # a later fit with more steps continues with this size
        _set_max_steps(trainer, trainer.global_step if is_spent else max(self._budget.steps, trainer.global_step + 1))

    def _samples_left(self) -> float:
        return math.inf if self._budget is None else self._budget.samples_left()

    def _cut_last_step(self, current: EpochProgress) -> None:
        # The last step takes the remaining samples, like an epoch's last step; policies still see the full size.
        left = self._samples_left()
        if 0 < left < current.batch_size:
            self._uncut = current.batch_size
            current.resize(max(int(left), self.loader.ranks.size))

    # The end of an epoch, and of fit

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure, decide and apply, after Lightning steps epoch schedulers and before it saves checkpoints."""
        if self.control is None or trainer.fast_dev_run or not trainer.is_last_batch:
            return  # stopped within an epoch by max_steps, max_time or early stopping
        self._check_unchanged(trainer)  # by later callbacks
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
        """Detach everything after a failure, for which Lightning does not call `teardown`."""
        self._leave(keep_state=trainer.world_size == 1)  # a failed rank cannot take part in gathering state

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach everything."""
        self._leave()

    def _leave(self, *, keep_state: bool = True) -> None:
        """Detach everything, and keep the current state for later checkpoints."""
        if self._is_fitting and self.control is not None:
            with suppress(UsageError):  # after a failed step() there is no state to continue from
                self._last = state_of(self.control) if keep_state else {}
            self._is_fitting = False
            self.control.close()
        while self._undo:
            self._undo.pop()()
        self._passes = self._budget = None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, which includes the loader's position and an epoch's sums."""
        if not self._is_fitting:
            return self._last
        if self._passes is not None and self._passes.is_within_step and not self._has_warned:
            self._has_warned = True
            warn_user(
                "a checkpoint is saved between the passes of an optimizer step: a resume loses the "
                "gradients of earlier passes. Save between steps, as ModelCheckpoint(every_n_train_steps=...) does"
            )
        assert self.control is not None
        return state_of(self.control)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, now or once there is an optimizer; most strategies load callbacks earlier."""
        self._to_load = state_dict
        if self.control is None or not self._is_fitting or not state_dict:
            return
        load_state(self.control, state_dict)
        self._to_load, self._is_resumed, self._position = {}, True, state_dict["loader"]


def _unit_of(config: Any) -> Unit:
    """Return the unit of a scheduler's steps from its `interval`."""
    if config.interval == "epoch" or config.reduce_on_plateau:
        return "epoch" if config.interval == "epoch" else "call"
    return "step" if config.frequency == 1 else "call"


def _set_max_steps(trainer: Any, steps: int) -> None:
    trainer.fit_loop.epoch_loop.max_steps = steps


def check_epochs(trainer: Any, *, in_passes: bool) -> None:
    """Raise if a setting would end epochs early; `in_passes`: the loader's batches keep their sizes."""
    if trainer.reload_dataloaders_every_n_epochs != 1 and not in_passes:
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}) never learns "
            f"of a new batch size, or drops samples: pass reload_dataloaders_every_n_epochs=1"
        )
    if not trainer.fast_dev_run and (trainer.limit_train_batches != 1.0 or trainer.overfit_batches):
        raise ArgumentError(
            f"limit_train_batches={trainer.limit_train_batches} and overfit_batches={trainer.overfit_batches} end "
            f"an epoch before all samples were seen: train on a Subset instead"
        )
    counts_batches = isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None
    if counts_batches and not in_passes:
        raise ArgumentError(
            f"val_check_interval={trainer.val_check_interval} counts batches, and an epoch may get fewer: "
            f"use a fraction of an epoch, such as 0.5"
        )


def check_accumulation(trainer: Any, module: Any) -> None:
    """Raise if something else sets the number of passes in a step."""
    if not module.automatic_optimization:
        raise ArgumentError(
            f"{type(module).__name__} has automatic_optimization=False, and only Lightning's own can make steps of "
            f"several passes: leave out every_steps and delivery_size, and accumulate in training_step"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ArgumentError(
            f"{type(trainer.strategy).__name__} accumulates gradients by itself, a fixed number of passes: leave out "
            f"accumulate_grad_batches, every_steps and the loader's delivery_size"
        )


def check_optimizer(trainer: Any) -> None:
    """Raise if there are several optimizers, or schedules that are stepped once in several batches."""
    if len(trainer.optimizers) != 1:
        raise ArgumentError(f"one optimizer can be followed, the module has {len(trainer.optimizers)}")
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise ArgumentError(
                f"{type(config.scheduler).__name__} has interval='step' and frequency={config.frequency}, counted in "
                f"batches, whose number changes: use frequency=1 and a schedule stretched by this factor"
            )


class NoiseScaleCallback(LightningCallback):  # type: ignore[misc]
    """A callback that logs the gradient noise scale of any training with Lightning, and changes nothing.

        trainer = Trainer(callbacks=[NoiseScaleCallback()])

    Every `every_steps` optimizer steps the loggers get `noise_scale` and the ends of its 95 % interval,
    `noise_scale_low` and `noise_scale_high`, all in samples. `noise_scale` is left out if it is unknown, and
    `noise_scale_high` if the interval has no upper end (see `NoiseMeter`). `readings` has all readings.

    Without `batch_size`, the samples of a step are counted by the first dimension of each batch's first tensor. Their
    sum over the passes of a step is multiplied by the number of processes, which must have equal shares. A reading has
    the size of most of its steps, so an epoch's short last step does not matter. If the size changes for good, as with
    a `BatchSizeCallback`, the earlier steps are dropped and a new reading begins.

    Args:
        every_steps: Number of optimizer steps between two readings.
        batch_size: Samples of an optimizer step, in all passes and processes together. None: count them.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them.
    """

    def __init__(self, *, every_steps: int = 100, batch_size: int | None = None, preconditioned: bool = False) -> None:
        require_count("every_steps", every_steps)
        if batch_size is not None:
            require_count("batch_size", batch_size)
        self.every_steps, self.batch_size, self.preconditioned = every_steps, batch_size, preconditioned
        self.readings: list[NoiseScale] = []
        self._meter: NoiseMeter | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the optimizer, now that it exists."""
        if len(trainer.optimizers) != 1:
            raise ArgumentError(f"one optimizer can be watched, the module has {len(trainer.optimizers)}")
        self._meter = NoiseMeter(trainer.optimizers[0], preconditioned=self.preconditioned)
        self._sizes: Counter[int] = Counter()
        """The number of steps since the last reading for each number of samples."""
        self._samples = 0
        """Number of samples of this process since the last step."""
        self._last_size = self._usual_size = 0
        """Samples of the last step, and of the last two successive steps of equal size; 0: none yet."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the number of steps, which a checkpoint may have set."""
        self._at_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples of a pass, and the step if the pass completes one."""
        if self.batch_size is None:
            self._samples += _num_samples(batch)
        if trainer.global_step == self._at_step:
            return
        self._count_step(self.batch_size or self._samples * trainer.world_size)
        self._at_step, self._samples = trainer.global_step, 0
        if self._sizes.total() >= self.every_steps:
            self._read(trainer)

    def _count_step(self, size: int) -> None:
        assert self._meter is not None
        has_changed = size == self._last_size != self._usual_size  # twice in a row: not an epoch's short last step
        is_first, self._last_size = self._usual_size == 0, size
        if has_changed:
            self._usual_size = size
        if has_changed and not is_first:
            self._meter.read(size)
            self._sizes.clear()
        else:
            self._sizes[size] += 1

    def _read(self, trainer: Any) -> None:
        assert self._meter is not None
        reading = self._meter.read(self._sizes.most_common(1)[0][0])
        self._sizes.clear()
        self.readings.append(reading)
        metrics = reading.known()
        trainer.callback_metrics.update({name: Tensor([value])[0] for name, value in metrics.items()})
        # Directly to the loggers: `log` would drop readings that are not at a multiple of log_every_n_steps.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None

    on_exception = teardown  # after a failure Lightning does not call `teardown`


def _num_samples(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    if (first := next(tensors, None)) is None:
        raise ArgumentError(
            f"a batch of type {type(batch).__name__} shows no tensor to count samples by: pass "
            f"NoiseScaleCallback(batch_size=...), the samples of an optimizer step"
        )
    return len(first)
