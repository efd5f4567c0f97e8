"""Hugging Face Transformers: a Trainer whose gradient accumulation follows a policy, and a callback that only measures.

The Trainer fixes its loader and its schedule before the first step, so neither may change. Only
`gradient_accumulation_steps` changes: a backward pass always takes `per_device_train_batch_size` samples.
"""

import gc
import inspect
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from divebatch.checks import require_count, warn_user
from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation import InMultiples, PassCount, refuse_loss
from divebatch.integrations.versions import require_installed
from divebatch.lr import Coupling
from divebatch.noise_meter import NoiseMeter
from divebatch.norms import rule_for
from divebatch.norms.forms import Explicit, Form, Outer, positions
from divebatch.norms.loss_scale import LossWeight
from divebatch.parts import require_step_cadence
from divebatch.policies import Fixed, Policy
from divebatch.ranks import RankShard
from divebatch.records import EpochRecord

# Before 5.5.4, the Trainer and Accelerate both divided some losses by the number of passes.
require_installed(["transformers"], extra="transformers", oldest="5.5.4", too_new="5.24")

Trainer: Any = import_module("transformers").Trainer
TrainerCallback: Any = import_module("transformers").TrainerCallback
LabelSmoother: Any = import_module("transformers.trainer_pt_utils").LabelSmoother
Conv1D: Any = import_module("transformers.pytorch_utils").Conv1D
# A child of the "transformers" logger, so that its verbosity applies.
logger: Any = import_module("transformers.utils.logging").get_logger("transformers.divebatch")


_TAKEN_OVER = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")


class TrainerLoader(AdaptiveLoader):
    """An `AdaptiveLoader` that keeps its place when the Trainer sets the epoch, even within an epoch."""

    def set_epoch(self, epoch: int) -> None:
        # The loader itself counts epochs, but a dataset may shuffle by the epoch's number.
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class BatchSizeTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose batch size a policy sets.

        trainer = BatchSizeTrainer(model=model, args=args, train_dataset=dataset, policy=Auto(max_batch_size=1024))

    The batch size is that of an optimizer step on all processes. The first is `per_device_train_batch_size *
    gradient_accumulation_steps * processes`; all others are multiples of one backward pass on all processes. Samples
    are sequences. If the loss is a mean over tokens, each sequence is weighted by its tokens in the optimizer step.
    Samples come in the order of an `AdaptiveLoader` with the seed `data_seed` or `seed`, for any number of processes.

    The length of training is counted in samples: `max_steps=N` and `num_train_epochs` mean the samples that the plain
    Trainer would see with the first batch size. If the batch grows, training therefore takes fewer steps. The schedule
    also follows samples, so it reaches its end.

    `records` has each epoch's record; logs show `batch_size` and the current learning rate. Checkpoints may be saved at
    any step, and training resumes exactly. For a subclass of Trainer: `class Mine(BatchSizeTrainer, Theirs)`.

    Args:
        positional: Arguments of `transformers.Trainer`.
        policy: The rule that sets the batch size.
        estimator: The estimator of gradient noise, by name or as an object. None: the policy's own.
        lr_coupling: The dependence of the learning rate on the batch size. None: the policy's own, or else "none".
        every_steps: Decide also within an epoch, every N optimizer steps. None: only at the ends of epochs.
        step_schedule: Whether to accept your own scheduler (`optimizers=`), which must not depend on the number of
            steps, because this number changes.
        settings: Named arguments of `transformers.Trainer`.
    """

    def __init__(
        self,
        *positional: Any,
        policy: Policy,
        estimator: str | Estimator | None = None,
        lr_coupling: Coupling | None = None,
        every_steps: int | None = None,
        step_schedule: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*positional, **settings)
        _refuse_settings(self)
        refuse_loss(policy)
        require_step_cadence(every_steps, policy)
        if self.lr_scheduler is not None and not step_schedule:
            raise ArgumentError(
                f"{type(self.lr_scheduler).__name__} is stepped once an optimizer step, and their number changes: set "
                f"lr_scheduler_type, or pass step_schedule=True if the schedule does not depend on this number"
            )
        self.policy, self.lr_coupling, self.every_steps, self._estimator = policy, lr_coupling, every_steps, estimator
        self.batch_control: Controller | None = None
        self.records: list[EpochRecord] = []
        self._first_passes = self.args.gradient_accumulation_steps
        self._passes_before, self._rows_in_pass, self._samples_in_step = 0, 0, 0
        self._shards: deque[RankShard] = deque()
        self._resume_from: dict[str, Any] | None = None
        self._follow = Follow(self)
        # First, so that all others see the right number and end of the epoch.
        self.callback_handler.callbacks.insert(0, self._follow)

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """Train; at the end or after an error, remove all hooks from the model and restore `args`.

        A second call starts again at the first batch size with new `records`, but with the optimizer's current state.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the last complete checkpoint in
                `args.output_dir`. None: start a new training.
            positional: Other arguments of `transformers.Trainer.train`.
            named: Other named arguments of `transformers.Trainer.train`.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(self.args.output_dir) or True
        elif resume_from_checkpoint:
            _require_complete(Path(resume_from_checkpoint))
        self._forget_last_training()
        try:
            return super().train(resume_from_checkpoint, *positional, **named)
        finally:
            self._follow.leave()
            self.args.gradient_accumulation_steps = self._first_passes

    def _forget_last_training(self) -> None:
        if self.batch_control is None:
            return
        self.batch_control._rates.follow(self.batch_control.first_batch_size)  # Adam's step count is in such steps
        self.batch_control, self.records = None, []
        if self._created_lr_scheduler:  # the Trainer makes a new one, and two would drive the optimizer
            self.lr_scheduler = self.callback_handler.lr_scheduler = None
        gc.collect()  # schedulers are in reference cycles

    # Before training starts

    @property
    def _pass_samples(self) -> int:
        """Number of samples of a backward pass on all processes."""
        return int(self._train_batch_size * self.args.world_size)

    def get_train_dataloader(self) -> TrainerLoader:
        """Make a loader of passes of `per_device_train_batch_size` samples on each process."""
        theirs = super().get_train_dataloader()
        self.args.gradient_accumulation_steps = self._first_passes
        self.train_loader = TrainerLoader(
            theirs.dataset,
            self._pass_samples * self._first_passes,
            shuffle=_is_shuffled(theirs),
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            delivery_size=self._pass_samples,
            **{name: getattr(theirs, name) for name in _TAKEN_OVER},
        )
        return self.train_loader

    def set_initial_training_values(self, args: Any, dataloader: TrainerLoader) -> Any:
        """Compute the length of training at the first batch size; an epoch has at most as many steps as passes."""
        if not isinstance(dataloader, TrainerLoader):
            raise ArgumentError(
                f"get_train_dataloader of {type(self).__name__} returns a {type(dataloader).__name__}, whose batches "
                f"have a fixed size: leave it out, and pass train_dataset and data_collator"
            )
        epochs, _, examples, samples, batch_size, passes, steps = super().set_initial_training_values(args, dataloader)
        is_stream = isinstance(dataloader.dataset, IterableDataset)
        of_epoch = dataloader.dataset_size
        if of_epoch is not None and dataloader.drop_last:
            of_epoch -= of_epoch % self._pass_samples
        self._length = RunLength(
            first_steps=steps,
            first_batch_size=self._pass_samples * self._first_passes,
            epoch_samples=of_epoch,
            pass_samples=self._pass_samples,
        )
        self._warn_of_length()
        # Each worker of a stream may end with a shorter pass, so only a bound is known: one sample a pass.
        most = self._length.samples if is_stream else passes
        return epochs, most, examples, samples, batch_size, most, steps

    def _warn_of_length(self) -> None:
        length, steps = self._length, self.args.max_steps
        if steps > 0 and self.is_world_process_zero():
            logger.warning(
                f"max_steps={steps} counts steps of the first batch size: training ends after {length.samples} "
                f"samples, in fewer steps if batches grow"
            )
        ends_early = length.epoch_samples is None or length.samples < length.epoch_samples
        if ends_early and self.every_steps is None and not isinstance(self.policy, Fixed):
            warn_user(
                f"the batch size is decided at the ends of epochs, and this training of {length.samples} samples may "
                f"end before the first: pass BatchSizeTrainer(..., every_steps=N) to decide every N steps"
            )

    def _init_training_state(self, *positional: Any) -> tuple[int, int]:
        # The Trainer would compute the finished epochs from its steps, whose number per epoch has changed.
        epochs_trained, skipped = super()._init_training_state(*positional)
        checkpoint = positional[3]
        if checkpoint is None:
            return epochs_trained, skipped
        saved = _load_state(
            Path(checkpoint),
            pass_samples=self._pass_samples,
            first_batch_size=self._pass_samples * self._first_passes,
        )
        self._resume_from = saved["control"]
        return saved["control"]["epoch"], 0  # the loader itself continues within the epoch

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule for the first batch size, driven by samples."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        raw = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = super().create_scheduler(num_training_steps, raw)
        if type(scheduler) is not LambdaLR:
            raise ArgumentError(
                f"lr_scheduler_type={self.args.lr_scheduler_type.value!r} makes a {type(scheduler).__name__}, which "
                f"cannot be driven by samples: use 'linear', 'cosine' or another that is a LambdaLR"
            )
        scheduler.lr_lambdas = [self._by_samples(schedule) for schedule in scheduler.lr_lambdas]
        return scheduler

    def _by_samples(self, schedule: Callable[[Any], float]) -> Callable[[int], float]:
        def at_samples(_: int) -> float:  # the number of optimizer steps changes with the batch size
            length = self._length
            return schedule(length.first_steps * self.train_loader.samples_delivered / length.samples)

        return at_samples

    # One optimizer step

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Fetch the passes of an optimizer step, whatever number the Trainer expects."""
        loader, length = self.train_loader, self._length
        before = loader.samples_delivered
        passes, num_items = super().get_batch_samples(self._passes_of_step(epoch_iterator), sys.maxsize, device)
        if not passes:  # the epoch or the training has ended, even if the Trainer expects more steps
            self.control.should_epoch_stop = True
            return passes, num_items
        self._samples_in_step = loader.samples_delivered - before
        size = self._size_in_force
        self.args.gradient_accumulation_steps = PassCount(
            length.passes(size), before=self._passes_before, made=len(passes)
        )
        self._passes_before += len(passes)
        self.state.max_steps = self.state.global_step + length.steps_left(before, size)
        return passes, num_items

    def _passes_of_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        # The first pass makes a due decision, so the number of passes is known only then.
        loader, length = self.train_loader, self._length
        left = length.passes(length.samples - loader.samples_delivered)
        self._shards.clear()
        while left > 0 and (batch := next(batches, None)) is not None:
            self._shards.append(loader.rank_shard)
            yield batch
            # Do not ask for more after an epoch's last pass, which would end the epoch before its last step.
            if loader.is_at_end or len(self._shards) >= min(left, length.passes(self._size_in_force)):
                return

    @property
    def _size_in_force(self) -> int:
        # The loader's `batch_size`, if set by hand, is for the next epoch.
        current = self.train_loader.current
        return self.train_loader.batch_size if current is None else current.batch_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        # A stand-in for a process without a sample has no tokens.
        if any(shard.is_stand_in for shard in self._shards):
            pairs = zip(batch_samples, self._shards, strict=True)
            batch_samples = [_without_labels(batch) if shard.is_stand_in else batch for batch, shard in pairs]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run a pass, whose loss is marked with its weight in the step."""
        self._rows_in_pass = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
        # The passes of a step were all delivered before the first one runs.
        self.train_loader.rank_shard = self._shards.popleft()
        self._pass_weight, self._shard_weight = self._weights(self.train_loader.rank_shard, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)

    def _weights(self, shard: RankShard, num_items: Any) -> tuple[LossWeight, float]:
        """Return the weight of a pass's loss in its step, and the factor that the loss still lacks on this process."""
        is_whole_steps = getattr(self, "loss_is_scaled_for_ga", None)  # the user's setting, from 5.20
        if is_whole_steps is None:
            by_items = self.model_accepts_loss_kwargs and num_items is not None
            is_whole_steps = by_items or self.compute_loss_func is not None
        # A whole step's loss is divided by the items of the step on all processes, not by those of the pass.
        weight = (
            shard.num_samples / self._samples_in_step
            if is_whole_steps
            else 1 / self.current_gradient_accumulation_steps
        )
        is_summed = is_whole_steps and num_items is not None
        return LossWeight(weight), shard.weight_for("sum" if is_summed else "mean")

    def create_accelerator_and_postprocess(self) -> None:
        """Weight the losses that pass through the accelerator, also those of a subclass's `compute_loss`."""
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def weighted(loss: Tensor, **settings: Any) -> None:
            self._pass_weight.mark(loss)
            backward(loss if self._shard_weight == 1.0 else loss * self._shard_weight, **settings)

        self.accelerator.backward = weighted

    # Logs and checkpoints

    def _get_learning_rate(self) -> float:
        assert self.batch_control is not None
        return self.batch_control.lr

    def log(self, logs: dict[str, float], *positional: Any, **named: Any) -> None:
        """Add the batch size to each log of training."""
        if self.batch_control is not None and "loss" in logs:
            logs["batch_size"] = self.args.gradient_accumulation_steps * self._pass_samples
        super().log(logs, *positional, **named)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        assert self.batch_control is not None
        state = {
            "control": self.batch_control.state_dict(),
            "pass_samples": self._pass_samples,
            "first_batch_size": self._pass_samples * self._first_passes,
        }
        self.accelerator.wait_for_everyone()
        if self.args.should_save:  # the Trainer writes its own state next, as the last file
            _save_state(Path(output_dir), state)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    names = {"labels", "shift_labels"} & set(batch)
    return {**batch, **{name: torch.full_like(batch[name], -100) for name in names}}


class Follow(TrainerCallback):  # type: ignore[misc]
    """The callback that makes the controller of a `BatchSizeTrainer` and lets it decide after epochs."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the controller, now that model, optimizer and scheduler are complete and loaded from a checkpoint."""
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
            scheduler_unit="call",  # the schedule itself counts samples
            every_steps=trainer.every_steps,
            loss_reduction="weighted",  # the trainer weights losses that are not weighted yet
        )
        if trainer._resume_from is not None:
            trainer.batch_control.load_state_dict(trainer._resume_from)
            trainer._resume_from = None

    def _expand_positions(self, _: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Copy positions that all samples share for each sample, so that each has its own gradient."""
        ids, count = inputs[0], self.trainer._rows_in_pass
        is_shared = ids.ndim == 2 and len(ids) == 1 and count > 1 and torch.is_grad_enabled()
        return (ids.expand(count, -1), *inputs[1:]) if is_shared else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer counts passes from here, even if an epoch is resumed in the middle.
        self.trainer._passes_before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the epoch after its last step, before the step is logged and saved."""
        trainer = self.trainer
        state.epoch = trainer._length.epochs(trainer.train_loader.samples_delivered)
        if trainer.train_loader.is_at_end:
            self._end_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a stream's epoch, whose end shows only when no more samples come."""
        trainer = self.trainer
        if trainer.train_loader.epoch == trainer.batch_control.epoch:
            return
        self._end_epoch(state)
        if trainer._passes_before == 0:  # resumed at a stream's end: the Trainer finds no sample and would stop
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
        if self.trainer.batch_control is not None:
            self.trainer.batch_control.close()
        while self._hooks:
            self._hooks.pop().remove()


def _is_shuffled(theirs: Any) -> bool:
    """Return whether the Trainer's loader shuffles; raise unless its sampler shuffles or keeps the order."""
    if isinstance(theirs.dataset, IterableDataset):
        return False
    cutting = getattr(theirs.batch_sampler, "batch_sampler", theirs.batch_sampler)  # inside each process's share
    sampler = getattr(cutting, "sampler", cutting)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(theirs.dataset):
        return True
    raise ArgumentError(
        f"the training loader has a {type(sampler).__name__}, but a BatchSizeTrainer takes every sample once an epoch, "
        f"shuffled or in order: leave out _get_train_sampler or get_train_dataloader, and let the dataset repeat some"
    )


def _refuse_settings(trainer: Any) -> None:
    """Raise an error that names all unsupported settings."""
    args, accelerator = trainer.args, trainer.accelerator
    together = args.world_size > 1
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    smoother_knows_step = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    wrong = {
        f"auto_find_batch_size={args.auto_find_batch_size}": args.auto_find_batch_size,
        f"train_sampling_strategy={args.train_sampling_strategy!r} (use 'random' or 'sequential')": (
            args.train_sampling_strategy not in ("random", "sequential")
        ),
        f"label_smoothing_factor={args.label_smoothing_factor} (this version of transformers makes the gradient as "
        f"many times too large as there are accumulated passes: use 5.15 or later)": (
            args.label_smoothing_factor > 0 and trainer.model_accepts_loss_kwargs and not smoother_knows_step
        ),
        f"n_gpu={args.n_gpu} (DataParallel: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one)": (
            args.n_gpu > 1
        ),
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "parallelism_config": getattr(accelerator, "parallelism_config", None) is not None,
        f"an IterableDataset on {args.world_size} processes (use a map-style dataset)": together and is_stream,
        "average_tokens_across_devices=False on several processes (each would weigh its tokens by its own number)": (
            together and not args.average_tokens_across_devices
        ),
        "accelerator_config.split_batches=True (per_device_train_batch_size is that of one process)": (
            together and bool(args.accelerator_config.split_batches)
        ),
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ArgumentError(f"with a changing batch size these settings do not work: {'; '.join(found)}")


class RunLength:
    """The length of a training, which the Trainer counts in steps of the first batch size.

    Each epoch ends with a step on its remaining samples. If `epoch_samples` is None, an epoch's length is unknown. A
    backward pass has `pass_samples` samples on all processes.

    >>> RunLength(first_steps=5, first_batch_size=6, epoch_samples=20, pass_samples=2).samples  # 6, 6, 6, 2 and 6
    26
    """

    def __init__(self, *, first_steps: int, first_batch_size: int, epoch_samples: int | None, pass_samples: int):
        self.first_steps, self.epoch_samples, self.pass_samples = first_steps, epoch_samples, pass_samples
        self.samples = first_steps * first_batch_size
        if epoch_samples is not None:
            epochs, steps = divmod(first_steps, math.ceil(epoch_samples / first_batch_size))
            self.samples = epochs * epoch_samples + steps * first_batch_size

    def epochs(self, samples: int) -> float:
        """Return `samples` in epochs, or for a stream of unknown length as a fraction of the training."""
        return samples / (self.epoch_samples or self.samples)

    def passes(self, samples: int) -> int:
        """Return the number of backward passes for `samples`."""
        return math.ceil(samples / self.pass_samples)

    def steps_left(self, samples: int, batch_size: int) -> int:
        """Return the number of optimizer steps left after `samples` if the batch size stays the same."""
        size = self.passes(batch_size) * self.pass_samples
        left = self.samples - samples
        if self.epoch_samples is None:
            return math.ceil(left / size)
        now = min(left, self.epoch_samples - samples % self.epoch_samples)
        epochs, part = divmod(left - now, self.epoch_samples)
        return math.ceil(now / size) + epochs * math.ceil(self.epoch_samples / size) + math.ceil(part / size)


STATE_FILE = "divebatch.pt"
_TRAINER_STATE = "trainer_state.json"


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    unfinished = folder / f"{STATE_FILE}.part"
    torch.save(state, unfinished)
    os.replace(unfinished, folder / STATE_FILE)  # a process killed earlier leaves no file of this name


def _require_complete(folder: Path) -> None:
    if not _is_complete(folder):
        raise CheckpointError(
            f"'{folder}' has no {STATE_FILE} or no whole {_TRAINER_STATE}: it was not saved by a BatchSizeTrainer, or "
            f"with save_only_model=True, or not whole. train(resume_from_checkpoint=True) takes the last complete one"
        )


def _load_state(folder: Path, *, pass_samples: int, first_batch_size: int) -> dict[str, Any]:
    # A checkpoint may come from elsewhere, and a pickle can execute code.
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
    there, here = (state["pass_samples"], state["first_batch_size"]), (pass_samples, first_batch_size)
    if there != here:
        raise CheckpointError(
            f"'{folder}' is of a training with {there[0]} samples a pass and {there[1]} in the first batch, and here "
            f"they are {here[0]} and {here[1]}: set per_device_train_batch_size to {there[0]} over the number of "
            f"processes, and gradient_accumulation_steps={there[1] // there[0]}"
        )
    return state


def _last_complete(output_dir: str) -> str | None:
    """Return the last complete checkpoint; None: there is no checkpoint."""
    numbered = {int(path.name.partition("-")[2]): path for path in Path(output_dir).glob("checkpoint-[0-9]*")}
    for number in sorted(numbered, reverse=True):
        if _is_complete(numbered[number]):
            return str(numbered[number])
        logger.warning(f"'{numbered[number]}' is not complete and is left out: was its process killed meanwhile?")
    if numbered:
        raise CheckpointError(f"no checkpoint in '{output_dir}' is complete: train without resume_from_checkpoint")
    return None


def _is_complete(folder: Path) -> bool:
    try:  # the Trainer's own state is written last
        json.loads((folder / _TRAINER_STATE).read_text())
    except (OSError, ValueError):
        return False
    return (folder / STATE_FILE).is_file()


class NoiseScaleCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that logs the gradient noise scale of a plain `transformers.Trainer` and changes nothing.

        trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[NoiseScaleCallback()])

    Each log of the training loss also has `noise_scale` and the ends of its 95 % interval, `noise_scale_low` and
    `noise_scale_high`, all in sequences, over the steps since the last reading. Unknown and infinite numbers are left
    out. The measurement and its limits are those of `NoiseMeter`.

    The Trainer calls its own reporters (W&B, TensorBoard) before `callbacks=[...]`. To include them, put this callback
    first: `NoiseScaleCallback().add_to(trainer)`.

    Args:
        every_steps: Read, and let the Trainer log, every N optimizer steps. None: read whenever the Trainer logs.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them.
        sketch: Whether to keep sketches of gradients instead of whole gradients. None: only if the model is large.
    """

    def __init__(
        self, *, every_steps: int | None = None, preconditioned: bool = False, sketch: bool | None = None
    ) -> None:
        if every_steps is not None:
            require_count("every_steps", every_steps)
        self._every_steps = every_steps
        self._settings: dict[str, Any] = {"preconditioned": preconditioned, "sketch": sketch}
        self._meter: NoiseMeter | None = None
        self._batch_size = 0

    def add_to(self, trainer: Any) -> None:
        """Add this callback to `trainer` before its reporters, so that they also get the noise scale.

        Args:
            trainer: The `transformers.Trainer`.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Watch the optimizer, now that it exists."""
        self.on_train_end(args, state, control)  # if the previous training ended with an error
        self._meter = NoiseMeter(parts["optimizer"], **self._settings)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a new reading if the batch size has changed, because a reading has a single batch size."""
        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        if size != self._batch_size and self._has_seen_steps:
            self._read()
        self._batch_size = size

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the Trainer log if a reading is due."""
        control.should_log |= self._every_steps is not None and self._is_due(state)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Add a reading to logs of the training loss."""
        if "loss" not in logs or not self._has_seen_steps or not self._is_due(state):
            return
        reading = self._read()
        logs.update(reading)
        state.log_history[-1].update(reading)  # the history has an earlier copy

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hook from the optimizer."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None

    def _is_due(self, state: Any) -> bool:
        return self._every_steps is None or state.global_step % self._every_steps == 0

    @property
    def _has_seen_steps(self) -> bool:
        # A GradScaler may have skipped all steps since the last reading.
        return self._meter is not None and self._meter._steps > 0

    def _read(self) -> dict[str, float]:
        assert self._meter is not None
        return self._meter.read(self._batch_size).known()


@rule_for(Conv1D)
def _conv1d(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Return the forms of GPT-2's linear layer, whose weight is stored transposed."""
    return {"weight": Outer(x, dy), "bias": Explicit(positions(dy).sum(1))}
