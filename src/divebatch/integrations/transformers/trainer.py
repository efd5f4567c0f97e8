"""The Trainer whose gradient accumulation follows a policy."""

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from divebatch.checks import warn_user
from divebatch.controller import Controller, require_step_cadence
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation_policies import refuse_loss
from divebatch.integrations.pass_count import PassCount
from divebatch.integrations.transformers import checkpoints
from divebatch.integrations.transformers.follow import Follow
from divebatch.integrations.transformers.framework import Trainer, logger
from divebatch.integrations.transformers.loader import TrainerLoader, is_shuffled
from divebatch.integrations.transformers.refusals import refuse_settings
from divebatch.integrations.transformers.run_length import RunLength
from divebatch.lr import Coupling
from divebatch.norms.loss_scale import LossWeight
from divebatch.policies import Fixed, Policy
from divebatch.ranks import RankShard
from divebatch.records import EpochRecord

_TAKEN_OVER = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")


class BatchSizeTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` with the batch size that `policy` asks for.

        trainer = BatchSizeTrainer(model=model, args=args, train_dataset=dataset, policy=Auto(max_batch_size=1024))

    The batch size is that of an optimizer step on all processes, first `per_device_train_batch_size *
    gradient_accumulation_steps * processes`; every other one is a multiple of one backward pass on all processes.
    Samples are sequences: with a loss that is a mean over tokens, each sequence has the weight that its tokens have in
    the loss of its optimizer step. Samples come in the order of an `AdaptiveLoader` with the seed `data_seed` or
    `seed`, whatever the number of processes.

    The length of training is counted in samples: `max_steps=N` and `num_train_epochs` stand for the samples that the
    plain Trainer would see with the first batch size. Training ends when they have been seen, after fewer steps if the
    batches have grown, and the schedule, driven by samples too, is then at its end.

    Each epoch's record is in `records`; logs show `batch_size` and the learning rate in force. Checkpoints are saved at
    any step, and training resumes exactly. For a subclass of Trainer: `class Mine(BatchSizeTrainer, Theirs)`.

    Args:
        positional: What `transformers.Trainer` takes.
        policy: The rule that sets the batch size.
        estimator: What measures the gradients, a name or an object; None for the policy's own.
        lr_coupling: How the learning rate follows the batch size; None for the policy's own, "none" where it has none.
        every_steps: Decide also within epochs, after each so many optimizer steps of one; None for their ends alone.
        step_schedule: Whether a scheduler of your own (`optimizers=`) is taken: only if it does not rely on the
            number of steps, which changes.
        settings: What `transformers.Trainer` takes.
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
        refuse_settings(self)
        refuse_loss(policy)
        if every_steps is not None:
            require_step_cadence(every_steps, policy, None)
        if self.lr_scheduler is not None and not step_schedule:
            raise ArgumentError(
                f"{type(self.lr_scheduler).__name__} is stepped once an optimizer step, and their number changes: set "
                f"lr_scheduler_type instead, or pass step_schedule=True if it does not depend on it"
            )
        self.policy, self.lr_coupling, self.every_steps, self._estimator = policy, lr_coupling, every_steps, estimator
        self.batch_control: Controller | None = None
        self.records: list[EpochRecord] = []
        self._first_passes = self.args.gradient_accumulation_steps
        self._passes_before, self._rows_in_pass, self._samples_in_step = 0, 0, 0
        self._shards: deque[RankShard] = deque()
        self._resume_from: dict[str, Any] | None = None
        self._follow = Follow(self)
        # First, so that all others find the epoch's number and end right.
        self.callback_handler.callbacks.insert(0, self._follow)

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """As always; afterwards, and after an error, no hook is left on the model and `args` are as they were.

        A second call trains anew from the first batch size, with the optimizer as it is, and `records` are its own.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the last complete one in `args.output_dir`.
            positional: What `transformers.Trainer.train` takes.
            named: What `transformers.Trainer.train` takes.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.last_complete(self.args.output_dir) or True
        elif resume_from_checkpoint:
            checkpoints.require_complete(Path(resume_from_checkpoint))
        self._forget_last_training()
        try:
            return super().train(resume_from_checkpoint, *positional, **named)
        finally:
            self._follow.leave()
            self.args.gradient_accumulation_steps = self._first_passes

    def _forget_last_training(self) -> None:
        """Let go of the scheduler before: the Trainer makes another, and two would drive one optimizer."""
        if self.batch_control is None:
            return
        self.batch_control._rates.follow(self.batch_control.first_batch_size)  # Adam counts its steps in such ones
        self.batch_control, self.records = None, []
        if self._created_lr_scheduler:
            self.lr_scheduler = self.callback_handler.lr_scheduler = None
        gc.collect()  # a scheduler is part of a cycle

    # What the Trainer asks for before it starts

    @property
    def _pass_samples(self) -> int:
        """Samples of one backward pass on all processes."""
        return int(self._train_batch_size * self.args.world_size)

    def get_train_dataloader(self) -> TrainerLoader:
        """Every sample once an epoch, in passes of `per_device_train_batch_size` on each process."""
        theirs = super().get_train_dataloader()
        self.args.gradient_accumulation_steps = self._first_passes
        self.train_loader = TrainerLoader(
            theirs.dataset,
            self._pass_samples * self._first_passes,
            shuffle=is_shuffled(theirs),
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            delivery_size=self._pass_samples,
            **{name: getattr(theirs, name) for name in _TAKEN_OVER},
        )
        return self.train_loader

    def set_initial_training_values(self, args: Any, dataloader: TrainerLoader) -> Any:
        """The length of training at the first batch size; an epoch has at most as many steps as passes."""
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
        self._length = RunLength.of(
            first_steps=steps,
            first_batch_size=self._pass_samples * self._first_passes,
            epoch_samples=of_epoch,
            pass_samples=self._pass_samples,
        )
        self._tell_length()
        # Each worker of a stream ends with a shorter pass, so their number is not known; each has a sample at least.
        most = self._length.samples if is_stream else passes
        return epochs, most, examples, samples, batch_size, most, steps

    def _tell_length(self) -> None:
        """What would surprise."""
        length, steps = self._length, self.args.max_steps
        if steps > 0 and self.is_world_process_zero():
            logger.warning(
                f"max_steps={steps} counts steps of the first batch size: training ends after {length.samples} "
                f"samples, in fewer steps where batches grow"
            )
        ends_early = length.epoch_samples is None or length.samples < length.epoch_samples
        if ends_early and self.every_steps is None and not isinstance(self.policy, Fixed):
            warn_user(
                f"the batch size is decided at the ends of epochs, and this training of {length.samples} samples may "
                f"end before the first: pass BatchSizeTrainer(..., every_steps=N) to decide after each N steps"
            )

    def _init_training_state(self, *positional: Any) -> tuple[int, int]:
        """The epochs that are done: the Trainer would divide its steps by a number that has changed since."""
        epochs_trained, skipped = super()._init_training_state(*positional)
        checkpoint = positional[3]
        if checkpoint is None:
            return epochs_trained, skipped
        saved = checkpoints.load(
            Path(checkpoint),
            pass_samples=self._pass_samples,
            first_batch_size=self._pass_samples * self._first_passes,
        )
        self._resume_from = saved["control"]
        return saved["control"]["epoch"], 0  # the loader itself goes on after what it has delivered of an epoch

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the first batch size, at the point that the samples seen have reached."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        raw = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = super().create_scheduler(num_training_steps, raw)
        if type(scheduler) is not LambdaLR:
            raise ArgumentError(
                f"lr_scheduler_type={self.args.lr_scheduler_type.value!r} makes a {type(scheduler).__name__}, which "
                f"cannot be driven by samples, and the number of steps changes: use 'linear', 'cosine' or another of "
                f"its LambdaLRs"
            )
        scheduler.lr_lambdas = [self._by_samples(schedule) for schedule in scheduler.lr_lambdas]
        return scheduler

    def _by_samples(self, schedule: Callable[[Any], float]) -> Callable[[int], float]:
        # By samples: the number of optimizer steps changes with the batch size.
        return lambda _: schedule(self._length.schedule_place(self.train_loader.samples_delivered))

    # One optimizer step

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The passes of an optimizer step, however many the Trainer expects."""
        loader, length = self.train_loader, self._length
        before = loader.samples_delivered
        passes, num_items = super().get_batch_samples(self._passes_of_step(epoch_iterator), sys.maxsize, device)
        if not passes:  # the epoch or the training has ended; steps that the Trainer may still expect are none
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
        """How many they are is known when the first one has come: what is due is decided then."""
        loader, length = self.train_loader, self._length
        left = length.passes_left(loader.samples_delivered)
        self._shards.clear()
        while left > 0 and (batch := next(batches, None)) is not None:
            self._shards.append(loader.rank_shard)
            yield batch
            # Nothing is asked for after an epoch's last pass: that would end it before its last step is made.
            if loader.is_at_end or len(self._shards) >= min(left, length.passes(self._size_in_force)):
                return

    @property
    def _size_in_force(self) -> int:
        """That of the pass under way: the loader's `batch_size`, if set by hand, is for the next one."""
        current = self.train_loader.current
        return self.train_loader.batch_size if current is None else current.batch_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Tokens of the step; a stand-in for a process without a sample has none."""
        if any(shard.is_stand_in for shard in self._shards):
            pairs = zip(batch_samples, self._shards, strict=True)
            batch_samples = [_without_labels(batch) if shard.is_stand_in else batch for batch, shard in pairs]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One pass, with norms told how much of the optimizer step's loss it is."""
        self._rows_in_pass = _num_rows(inputs)
        # The passes of a step were all delivered before the first one runs.
        self.train_loader.rank_shard = self._shards.popleft()
        self._pass_weight, self._shard_weight = self._weights(self.train_loader.rank_shard, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)

    def _weights(self, shard: RankShard, num_items: Any) -> tuple[LossWeight, float]:
        """How much of its step's loss the loss of a pass is, and the factor that it still lacks on this process."""
        is_whole_steps = getattr(self, "loss_is_scaled_for_ga", None)  # what the user has said, from 5.20 on
        if is_whole_steps is None:
            by_items = self.model_accepts_loss_kwargs and num_items is not None
            is_whole_steps = by_items or self.compute_loss_func is not None
        # The loss of a whole step is divided by what the step holds on all processes, not by what the pass does.
        weight = (
            shard.num_samples / self._samples_in_step
            if is_whole_steps
            else 1 / self.current_gradient_accumulation_steps
        )
        is_summed = is_whole_steps and num_items is not None
        return LossWeight(weight), shard.weight_for("sum" if is_summed else "mean")

    def create_accelerator_and_postprocess(self) -> None:
        """Losses pass through the accelerator on their way backwards, also those of a subclass's `compute_loss`."""
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def weighted(loss: Tensor, **settings: Any) -> None:
            self._pass_weight.mark(loss)
            backward(loss if self._shard_weight == 1.0 else loss * self._shard_weight, **settings)

        # Here and not in compute_loss, which a subclass may replace.
        self.accelerator.backward = weighted

    # What logs and checkpoints hold

    def _get_learning_rate(self) -> float:
        """Return the rate in force; scheduler and groups hold the schedule's own."""
        assert self.batch_control is not None
        return self.batch_control.lr

    def log(self, logs: dict[str, float], *positional: Any, **named: Any) -> None:
        """Every log of training says with which batch size."""
        if self.batch_control is not None and "loss" in logs:
            logs["batch_size"] = self.args.gradient_accumulation_steps * self._pass_samples
        super().log(logs, *positional, **named)

    def _save_rng_state(self, output_dir: str) -> None:
        """Add the controller's state once all processes are through; the Trainer's own state, written next, is last."""
        super()._save_rng_state(output_dir)
        assert self.batch_control is not None
        state = {
            "control": self.batch_control.state_dict(),
            "pass_samples": self._pass_samples,
            "first_batch_size": self._pass_samples * self._first_passes,
        }
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.save(Path(output_dir), state)


def _num_rows(inputs: Any) -> int:
    return len(next(value for value in inputs.values() if isinstance(value, Tensor)))


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with labels that no loss counts."""
    names = {"labels", "shift_labels"} & set(batch)
    return {**batch, **{name: torch.full_like(batch[name], -100) for name in names}}
