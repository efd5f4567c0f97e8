"""Hugging Face Transformers: a Trainer whose gradient accumulation follows a policy.

The Trainer fixes its loader, its steps per epoch and its schedule before the first step, so none of them may move. What
moves is `gradient_accumulation_steps`: a backward pass always takes `per_device_train_batch_size` samples.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators import Estimator
from divebatch.integrations.accumulation_policies import InMultiples, refuse_loss
from divebatch.integrations.versions import Requirement
from divebatch.lr import Coupling
from divebatch.norms import rule_for
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.sample_gradients import Explicit, Form, Outer, positions
from divebatch.policies import Policy
from divebatch.records import EpochRecord
from divebatch.resolve import Trained, resolve_estimator

REQUIREMENT = Requirement(["transformers"], extra="transformers", oldest="5.22", too_new="5.23")
REQUIREMENT.installed()
_Trainer: Any = import_module("transformers").Trainer
_TrainerCallback: Any = import_module("transformers").TrainerCallback
_Conv1D: Any = import_module("transformers.pytorch_utils").Conv1D
STATE_FILE = "divebatch.pt"
_TAKEN_OVER = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")


@rule_for(_Conv1D)
def conv1d(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """GPT-2's linear layer: its weight is stored the other way round."""
    return {"weight": Outer(x, dy), "bias": Explicit(positions(dy).sum(1))}


class BatchSizeTrainer(_Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that gives each epoch the batch size `policy` asks for.

        trainer = BatchSizeTrainer(model=model, args=args, train_dataset=dataset, policy=Auto(max_batch_size=1024))

    The batch size is that of an optimizer step, first `per_device_train_batch_size * gradient_accumulation_steps`, then
    a multiple of the former. Samples are sequences: with a loss that is a mean over tokens, each sequence has the
    weight that its tokens have in the loss of its optimizer step. Samples come in the order of an `AdaptiveLoader`
    with the seed `data_seed` or `seed`. The schedule is the one the first batch size would have had, driven by samples.

    Each epoch's record is in `records`; logs show `batch_size` and the learning rate in force. Checkpoints are saved at
    the end of an epoch. For a subclass of Trainer: `class Mine(BatchSizeTrainer, Theirs)`.

    Args:
        positional: What `transformers.Trainer` takes.
        policy: The rule that sets the batch size.
        estimator: What measures the gradients, a name or an object; None for the policy's own.
        lr_coupling: How the learning rate follows the batch size; None for the policy's own, "none" where it has none.
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
        step_schedule: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*positional, **settings)
        _check(self.args)
        refuse_loss(policy)
        if self.lr_scheduler is not None and not step_schedule:
            raise ArgumentError(
                f"{type(self.lr_scheduler).__name__} is stepped once an optimizer step, and their number changes: set "
                f"lr_scheduler_type instead, or pass step_schedule=True if it does not depend on it"
            )
        self.policy, self.lr_coupling, self._estimator = policy, lr_coupling, estimator
        self.batch_control: Controller | None = None
        self.records: list[EpochRecord] = []
        self._first_passes = self.args.gradient_accumulation_steps
        self._samples_in_step, self._samples_in_pass = 0, 0
        self._resume_from: dict[str, Any] | None = None
        self._follow = _Follow(self)
        self.add_callback(self._follow)

    def train(self, *positional: Any, **named: Any) -> Any:
        """As always; afterwards, and after an error, no hook is left on the model and `args` are as they were.

        A second call trains anew from the first batch size, with the optimizer as it is, and `records` are its own.
        """
        self._forget_last_training()
        try:
            return super().train(*positional, **named)
        finally:
            self._follow.leave()
            self.args.gradient_accumulation_steps = self._first_passes

    def _forget_last_training(self) -> None:
        """Let go of the scheduler before: the Trainer makes another, and two would drive one optimizer."""
        if self.batch_control is None:
            return
        self.batch_control._rates.put_own_back()
        self.batch_control, self.records = None, []
        if self._created_lr_scheduler:
            self.lr_scheduler = self.callback_handler.lr_scheduler = None
        gc.collect()  # a scheduler is part of a cycle

    # What the Trainer asks for before it starts

    def get_train_dataloader(self) -> AdaptiveLoader:
        """Every sample once an epoch, in passes of `per_device_train_batch_size`."""
        theirs = super().get_train_dataloader()
        self.args.gradient_accumulation_steps = self._first_passes
        self.train_loader = AdaptiveLoader(
            theirs.dataset,
            self._train_batch_size * self._first_passes,
            shuffle=self.args.train_sampling_strategy != "sequential",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            delivery_size=self._train_batch_size,
            **{name: getattr(theirs, name) for name in _TAKEN_OVER},
        )
        return self.train_loader

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As many optimizer steps an epoch as there are passes: the Trainer skips those that find no data."""
        epochs, _, examples, samples, batch_size, passes, _ = super().set_initial_training_values(args, dataloader)
        return epochs, passes, examples, samples, batch_size, passes, epochs * passes

    def _init_training_state(self, *positional: Any) -> tuple[int, int]:
        """The epochs that are done: the Trainer would divide its steps by a number that has changed since."""
        epochs_trained, skipped = super()._init_training_state(*positional)
        checkpoint = positional[3]
        if checkpoint is None:
            return epochs_trained, skipped
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"'{checkpoint}' has no {STATE_FILE}: it was not saved by a BatchSizeTrainer")
        # A checkpoint may come from elsewhere, and a pickle can run anything.
        self._resume_from = torch.load(path, weights_only=True)
        return self._resume_from["epoch"], 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the first batch size, at the point that the samples seen have reached."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        raw = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = super().create_scheduler(math.ceil(num_training_steps / self._first_passes), raw)
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
        return lambda _: schedule(self.train_loader.batches_delivered / self._first_passes)

    # One optimizer step

    def get_batch_samples(self, *positional: Any, **named: Any) -> Any:
        """The passes of an optimizer step; how many samples they hold is what a token-weighted loss leaves out."""
        passes, num_items = super().get_batch_samples(*positional, **named)
        self._samples_in_step = sum(map(_num_samples, passes))
        return passes, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One pass, with norms told how much of the optimizer step's loss it is."""
        self._samples_in_pass = _num_samples(inputs)
        self._pass_weight = LossWeight(self._weight_of_pass(num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)

    def create_accelerator_and_postprocess(self) -> None:
        """Losses pass through the accelerator on their way backwards, also those of a subclass's `compute_loss`."""
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def marked(loss: Tensor, **settings: Any) -> None:
            self._pass_weight.mark(loss)
            backward(loss, **settings)

        # Here and not in compute_loss, which a subclass may replace.
        self.accelerator.backward = marked

    def _weight_of_pass(self, num_items: Any) -> float:
        by_items = self.model_accepts_loss_kwargs and num_items is not None
        is_whole_steps = by_items or self.compute_loss_func is not None
        if self.loss_is_scaled_for_ga is not None:
            is_whole_steps = self.loss_is_scaled_for_ga
        return (
            self._samples_in_pass / self._samples_in_step
            if is_whole_steps  # the loss is divided by what the whole step holds, not by what the pass does
            else 1 / self.current_gradient_accumulation_steps
        )

    # What logs show

    def _get_learning_rate(self) -> float:
        """The rate in force; a scheduler only knows its own rates."""
        return float(self.optimizer.param_groups[0]["lr"])

    def log(self, logs: dict[str, float], *positional: Any, **named: Any) -> None:
        """Every log of training says with which batch size."""
        if self.batch_control is not None and "loss" in logs:
            logs["batch_size"] = self.args.gradient_accumulation_steps * self._train_batch_size
        super().log(logs, *positional, **named)


class _Follow(_TrainerCallback):  # type: ignore[misc]
    """The Trainer's events, for the controller."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
            InMultiples(trainer.policy, trainer._train_batch_size),
            estimator=resolve_estimator(
                trainer.policy,
                trainer._estimator,
                Trained(trainer.model, [optimizer], trainer.train_loader),
                grad_scaler=trainer.accelerator.scaler,
            ),
            lr_coupling=trainer.lr_coupling,
            scheduler=trainer.lr_scheduler,
            schedule_in="calls",  # it counts samples by itself
        )
        if trainer._resume_from is not None:
            trainer.batch_control.load_state_dict(trainer._resume_from)
            trainer._resume_from = None

    def _expand_positions(self, _: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Positions that all samples share are given to each, so that each one's gradient is its own."""
        ids, count = inputs[0], self.trainer._samples_in_pass
        is_shared = ids.ndim == 2 and len(ids) == 1 and count > 1 and torch.is_grad_enabled()
        return (ids.expand(count, -1), *inputs[1:]) if is_shared else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self.trainer.train_loader
        args.gradient_accumulation_steps = math.ceil(loader.batch_size / self.trainer._train_batch_size)
        steps = math.ceil(len(loader) / args.gradient_accumulation_steps)
        state.max_steps = state.global_step + steps * (state.num_train_epochs - loader.epoch)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if trainer.train_loader.batches_delivered % len(trainer.train_loader):
            return  # stopped in the middle of an epoch
        record = replace(
            trainer.batch_control.step(), steps=state.global_step, micro_batch_size=trainer._train_batch_size
        )
        trainer.records.append(record)
        state.log_history.append(
            {"epoch": state.epoch, "step": state.global_step, "batch_size": record.batch_size}
            | ({} if record.diversity is None else {"diversity": record.diversity})
        )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.trainer.batch_control.state_dict(), folder / STATE_FILE)

    def leave(self) -> None:
        """Take every hook off the model again."""
        if self.trainer.batch_control is not None:
            self.trainer.batch_control.close()
        while self._hooks:
            self._hooks.pop().remove()


def _num_samples(inputs: Any) -> int:
    return len(next(value for value in inputs.values() if isinstance(value, Tensor)))


def _check(args: Any) -> None:
    """Refuse what would go wrong without a word."""
    wrong = {
        f"max_steps={args.max_steps} (a step's size changes: use num_train_epochs)": args.max_steps > 0,
        f"num_train_epochs={args.num_train_epochs} (whole epochs only)": args.num_train_epochs % 1 != 0,
        f"world_size={args.world_size} (one process only)": args.world_size > 1,
        f"n_gpu={args.n_gpu} (DataParallel: set CUDA_VISIBLE_DEVICES to one)": args.n_gpu > 1,
        f"auto_find_batch_size={args.auto_find_batch_size}": args.auto_find_batch_size,
        f"save_strategy={args.save_strategy.value!r} (use 'epoch' or 'no')": args.save_strategy.value
        not in ("epoch", "no"),
        f"train_sampling_strategy={args.train_sampling_strategy!r} (use 'random' or 'sequential')": (
            args.train_sampling_strategy not in ("random", "sequential")
        ),
    }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ArgumentError(f"with a batch size that changes these TrainingArguments do not work: {'; '.join(found)}")
