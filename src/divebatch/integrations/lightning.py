"""Lightning: callbacks that let a policy set the training's batch size, and that log the noise scale."""

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
    excluded=["2.6.2", "2.6.3"],  # they carried malware
)
LightningCallback: Any = type(
    "LightningCallback", tuple(import_module(_MODULES[name]).Callback for name in _INSTALLED), {}
)
"""A callback for the trainers of all installed packages."""

__all__ = ["BatchSizeCallback", "NoiseScaleCallback"]


class BatchSizeCallback(LightningCallback):  # type: ignore[misc]
    """A callback that gives the training the batch size of a policy, and lets the learning rate follow.

    Pass the same `loader` to the trainer, and let it look at the loader's length anew each epoch:

        loader = AdaptiveLoader(dataset, batch_size=128)
        callback = BatchSizeCallback(loader, Auto(max_batch_size=4096))
        trainer = Trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, loader)

    With `every_steps=`, with `Trainer(accumulate_grad_batches=...)`, or with a loader that has a `delivery_size`, a
    backward pass keeps its samples, and memory what it takes: the number of passes that make an optimizer step changes,
    and the policy's sizes are those of a step, in multiples of a pass. Several processes share each batch, whose size
    is that of all together.

    `Trainer(max_steps=N)` trains on as many samples as N steps of the first batch size hold, and samples also drive
    schedulers with `interval="step"`: a schedule of `trainer.estimated_stepping_batches` steps reaches its end.

    Each epoch's record is in `records`; its batch size and diversity go to the trainer's loggers. Checkpoints hold the
    whole state, also in the middle of an epoch.

    Args:
        loader: The `AdaptiveLoader` that the trainer is given too.
        policy: The rule that sets its batch size.
        estimator: What measures the gradients, a name or an object. None: the policy's own.
        lr_coupling: How the learning rate follows the batch size. None: the policy's own, "none" if it has none.
        loss_reduction: How the loss of each backward pass is reduced over its batch, "mean" or "sum".
        every_steps: Decide also within epochs, after every N optimizer steps. None: at the ends of epochs alone.
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
        """The batch size that loggers know."""
        self._passes: StepPasses | None = None
        self._budget: StepBudget | None = None
        self._uncut: int | None = None
        """The batch size that the last step of all was cut from."""
        self._undo: list[Callable[[], None]] = []

    # From the start of fit to its end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the number of passes, from which the module may compute its schedulers' lengths from here on."""
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
        """Make the controller: optimizer and schedulers exist, and no batch has been asked for yet."""
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
                f"callback: it was saved without it, or after an error; take another one"
            )
        self._check_unchanged(trainer)
        if self._is_resumed:
            self._resume(trainer)

    def _resume(self, trainer: Any) -> None:
        """Begin where the checkpoint was saved."""
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        # A module that asks for `estimated_stepping_batches` has made the trainer begin a pass before the load, and its
        # own state of the loader wait for the next epoch.
        fit._combined_loader_states_to_load = []
        self.loader.load_state_dict(self._position)
        if not epoch.restarting:  # it takes an epoch that was broken off for done
            self.loader.set_epoch(self.loader.epoch)
        if self._position["pass"] is None:  # with `max_steps` it continues in an epoch that is over
            epoch.batch_progress.reset_on_run()
        if self._passes is not None:  # a step begins here
            self._set_passes(trainer, self._num_passes, first=fit.batch_idx + 1)
        is_last = epoch.restarted_on_train_batch_end and epoch.batch_progress.is_last_batch
        if fit.restarted_mid_epoch and is_last:
            # Saved after an epoch's last batch: Lightning begins the next epoch and leaves out the end of this one.
            self._end_epoch(trainer)
            # Else it would take the batches that were made for some of the next epoch, if that has more.
            epoch.batch_progress.current.completed += len(self.loader)
        iter(fit._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that no other callback or hook has changed the loader or the number of passes."""
        self._check_unchanged(trainer)

    def _check_unchanged(self, trainer: Any) -> None:
        """Refuse another loader, and an accumulation that somebody else has set."""
        if trainer.train_dataloader is not self.loader:
            raise ArgumentError(
                f"the trainer's loader is a {type(trainer.train_dataloader).__name__} and not the callback's: pass the "
                f"callback's loader to fit, or return that very object from train_dataloader() each time"
            )
        if trainer.accumulate_grad_batches is not self._num_passes:
            raise ArgumentError(
                f"accumulate_grad_batches went from {self._num_passes} to {trainer.accumulate_grad_batches}: take out "
                f"what sets it, such as a GradientAccumulationScheduler, and leave the size of a step to the policy"
            )

    # One optimizer step

    def _begin_step(self, trainer: Any, count: int) -> None:
        """Set the number of passes of the step that begins."""
        self._check_unchanged(trainer)
        self._set_passes(trainer, count, first=trainer.fit_loop.batch_idx + 1)
        if self._logged not in (None, self.loader.batch_size):  # decided since the last step
            for logger in trainer.loggers:
                logger.log_metrics({"divebatch/batch_size": float(self.loader.batch_size)}, step=trainer.global_step)
        self._logged = self.loader.batch_size

    def _set_passes(self, trainer: Any, count: int, *, first: int = 0) -> None:
        self._num_passes = trainer.accumulate_grad_batches = PassCount(count, before=first)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Weigh the loss of a pass, which Lightning has divided by the number of passes."""
        if self._passes is not None:
            self._passes.weigh(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Set Lightning's limit of steps so that training ends when its samples are used up."""
        if self._budget is None:
            return
        is_spent = self._budget.samples_left() == 0
        current = self.loader.current
        if is_spent and self._uncut is not None and current is not None:
            current.resize(self._uncut)  # a later fit that is given more steps continues with it
        _set_max_steps(trainer, trainer.global_step if is_spent else max(self._budget.steps, trainer.global_step + 1))

    def _samples_left(self) -> float:
        return math.inf if self._budget is None else self._budget.samples_left()

    def _cut_last_step(self, current: EpochProgress) -> None:
        # The last step holds what is left, like an epoch's last one; the size that policies know stays.
        left = self._samples_left()
        if 0 < left < current.batch_size:
            self._uncut = current.batch_size
            current.resize(max(int(left), self.loader.ranks.size))

    # An epoch's end, and that of fit

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure, decide, apply: after Lightning's step of epoch schedulers, and before it saves checkpoints."""
        if self.control is None or trainer.fast_dev_run or not trainer.is_last_batch:
            return  # stopped in the middle of an epoch: by max_steps, max_time, early stopping
        self._check_unchanged(trainer)  # by callbacks that came after this one
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
        """Detach everything after a failure: Lightning then does not call `teardown`."""
        self._leave(keep_state=trainer.world_size == 1)  # a state of all ranks cannot be had from one that failed

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach everything."""
        self._leave()

    def _leave(self, *, keep_state: bool = True) -> None:
        """Detach everything; checkpoints written later hold the present state."""
        if self._is_fitting and self.control is not None:
            with suppress(UsageError):  # an epoch whose step() failed has no state to continue from
                self._last = state_of(self.control) if keep_state else {}
            self._is_fitting = False
            self.control.close()
        while self._undo:
            self._undo.pop()()
        self._passes = self._budget = None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state; the loader's position and an epoch's sums are in it."""
        if not self._is_fitting:
            return self._last
        if self._passes is not None and self._passes.is_within_step and not self._has_warned:
            self._has_warned = True
            warn_user(
                "a checkpoint is saved between the passes of an optimizer step: a resume continues without the "
                "gradients of those made. Save between steps, as ModelCheckpoint(every_n_train_steps=...) does"
            )
        assert self.control is not None
        return state_of(self.control)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, now or as soon as there is an optimizer: most strategies load callbacks before."""
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


def check_epochs(trainer: Any, *, in_passes: bool) -> None:
    """Refuse what would end an epoch early; `in_passes`: the loader's batches keep their sizes."""
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
            f"val_check_interval={trainer.val_check_interval} counts batches, and an epoch may come to have fewer: "
            f"use a part of an epoch, such as 0.5"
        )


def check_accumulation(trainer: Any, module: Any) -> None:
    """Refuse what else sets how many passes make a step."""
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
    """Refuse several optimizers, and schedules that are stepped once in several batches."""
    if len(trainer.optimizers) != 1:
        raise ArgumentError(f"one optimizer can be followed, the module has {len(trainer.optimizers)}")
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise ArgumentError(
                f"{type(config.scheduler).__name__} has interval='step' and frequency={config.frequency}, counted in "
                f"batches, whose number changes: use frequency=1 and a schedule that is as much slower"
            )


class NoiseScaleCallback(LightningCallback):  # type: ignore[misc]
    """A callback that logs the gradient noise scale of any training with Lightning, and changes nothing.

        trainer = Trainer(callbacks=[NoiseScaleCallback()])

    Every `every_steps` optimizer steps the loggers get `noise_scale`, and the ends of its 95 % interval,
    `noise_scale_low` and `noise_scale_high`, all in samples. `noise_scale` is left out if it is not known, and
    `noise_scale_high` if nothing bounds it (`NoiseMeter` says when). `readings` has them all.

    Without `batch_size` the samples of a step are counted in the batches: the first dimension of a batch's first
    tensor, summed over the passes of a step, times the number of processes, which are taken to have as many each. A
    reading takes the size that most of its steps had, so that an epoch's short last step does not matter. If the size
    changes for good, as beside a `BatchSizeCallback`, the steps before are dropped and a new reading begins.

    Args:
        every_steps: Optimizer steps between two readings.
        batch_size: Samples of an optimizer step, of all passes and processes together. None: they are counted.
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
        """Watch the optimizer, which exists now."""
        if len(trainer.optimizers) != 1:
            raise ArgumentError(f"one optimizer can be watched, the module has {len(trainer.optimizers)}")
        self._meter = NoiseMeter(trainer.optimizers[0], preconditioned=self.preconditioned)
        self._sizes: Counter[int] = Counter()
        """The number of steps since the last reading for each number of samples."""
        self._samples = 0
        """Samples of this process since the last step."""
        self._last_size = self._usual_size = 0
        """Samples of the last step, and of the last two that had equally many; 0 before there are any."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the number of steps, which a checkpoint may have set."""
        self._at_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples of a pass, and the step that it may have completed."""
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
        # To the loggers themselves: `log` would drop what does not fall on a multiple of log_every_n_steps.
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
            f"a batch of type {type(batch).__name__} shows no tensor whose samples could be counted: pass "
            f"NoiseScaleCallback(batch_size=...), the samples of an optimizer step"
        )
    return len(first)
