"""Optimizer steps of several backward passes, for frameworks that accumulate gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.utils.data import IterableDataset

from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import EpochProgress, num_batches
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.measurement import Decision, Measurement
from divebatch.norms.loss_scale import LossReduction, LossWeight
from divebatch.policies import Policy
from divebatch.policies.policy import in_multiples, require_policy
from divebatch.policies.wrappers import Around


def refuse_loss(policy: Policy) -> None:
    """Raise unless `policy` is a policy that does not need the epoch's loss, which adapters do not pass on."""
    require_policy(policy)
    if "loss" in policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} needs the epoch's mean training loss, which this adapter does not pass on: "
            f"use another policy, or a loop of your own with control.step(loss=...)"
        )


@dataclass(frozen=True)
class InMultiples(Around):
    """A policy whose sizes are rounded down to multiples of `unit`, the samples of one backward pass."""

    unit: int

    def next(self, seen: Measurement) -> Decision:
        return in_multiples(self.policy, seen, self.unit)


class PassCount(int):
    """A step's number of passes, for frameworks that find the ends of steps by a remainder.

    Lightning and the Hugging Face Trainer count the passes of an epoch and end a step if `count % passes` is 0. This
    test is right only if all steps of the epoch have equal numbers of passes. Modulo this number, the count starts at
    the first pass of the current step, so the remainder is 0 when the step begins and ends. In all other ways, and in
    checkpoints, this is a plain number.

    >>> passes = PassCount(4, before=3)  # three passes came before this step, which has four
    >>> [count % passes == 0 for count in (3, 4, 5, 6, 7)]
    [True, False, False, False, True]

    Args:
        number: Passes of a full step.
        before: Passes of the epoch before this step.
        made: Passes of this step, fewer than `number` if an epoch or the training ends. None: `number`.
    """

    before: int
    made: int

    def __new__(cls, number: int, *, before: int, made: int | None = None) -> Self:
        passes = super().__new__(cls, number)
        passes.before, passes.made = before, number if made is None else made
        return passes

    def __rmod__(self, count: Any) -> Any:
        return (count - self.before) % self.made

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


class StepBudget:
    """The samples left of a training with the length of `steps` first batches; a resume may change the first size."""

    def __init__(self, steps: int, first_batch_size: Callable[[], int], loader: AdaptiveLoader) -> None:
        self.steps, self._first, self._loader = steps, first_batch_size, loader

    def samples_left(self) -> float:
        """Return the samples left in the last epoch, current or next; infinity in all earlier epochs."""
        epochs, steps = self._length()
        current = self._loader.current
        is_over = current is not None and current.is_used_up
        epoch, samples = self._loader.epoch + is_over, 0 if current is None or is_over else current.samples
        if epoch != epochs:
            return math.inf if epoch < epochs else 0
        return max(0, steps * self._first() - samples)

    def _length(self) -> tuple[int, int]:
        # Whole epochs, and steps in one more epoch.
        size, first = self._loader.dataset_size, self._first()
        if size is None:
            return self._loader.epoch, self.steps  # a stream in its first pass
        passes = num_batches(size, self._loader.delivery_size or first, drop_last=self._loader.drop_last)
        return divmod(self.steps, math.ceil(passes / math.ceil(first / (self._loader.delivery_size or first))))


class StepPasses:
    """The division of optimizer steps into passes, with their number before each step and their weights.

    The loader delivers passes of `delivery_size` samples; its `batch_size` is the size of a step. An epoch's last step
    takes the remaining samples, and its gradient is their mean, as for a short last batch.

    Args:
        control: The controller of the loader, which must deliver each pass after the previous backward pass.
        on_step: Called with the number of passes before each step's first pass is fetched.
        loss_reduction: The reduction of a pass's loss over its samples, "mean" or "sum".
        samples_left: Returns the samples that training may still see in this epoch; infinity: no limit.
    """

    def __init__(
        self,
        control: Controller,
        on_step: Callable[[int], None],
        *,
        loss_reduction: LossReduction,
        samples_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._control, self._loader, self._on_step = control, control.loader, on_step
        self._reduction, self._samples_left = loss_reduction, samples_left
        self._count, self._samples = 1, 1
        self._current: EpochProgress | None = None
        self._end = 0
        control.then = self._before_pass

    def close(self) -> None:
        self._control.then = None

    @property
    def is_within_step(self) -> bool:
        """Whether a step has begun but not ended."""
        current = self._loader.current
        return current is not None and current is self._current and current.samples < self._end

    def _before_pass(self, current: EpochProgress) -> None:
        if current is self._current and current.samples < self._end:
            return
        delivered = current.cut_size
        # Counted in samples, because an epoch's last pass and last step may be short.
        left = (self._loader.dataset_size or 0) - current.samples
        if self._loader.drop_last:
            left -= left % delivered
        self._samples = int(min(current.batch_size, left, self._samples_left()))
        self._count = math.ceil(self._samples / delivered)
        self._current, self._end = current, current.samples + self._samples
        self._on_step(self._count)

    def weigh(self, loss: Tensor) -> None:
        """Multiply the current pass's loss by its weight in the step, and mark the loss with this weight for meters.

        The framework divides the loss by the number of passes, which suits means over passes of equal sizes.
        """
        shard = self._loader.rank_shard
        weight = LossWeight(1.0 if self._reduction == "sum" else shard.num_samples / self._samples)
        factor = weight * self._count
        if not math.isclose(factor, 1.0) and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * factor)
        weight.mark(loss)


def deliver_in_passes(loader: AdaptiveLoader, passes: int, setting: str) -> None:
    """Let `loader` deliver the passes of steps, each at first of `passes` batches.

    If the loader already has a `delivery_size`, `passes`, the framework's `setting`, must be 1.
    """
    if isinstance(loader.dataset, IterableDataset) and (loader.dataset_size is None or loader.num_workers > 1):
        raise ArgumentError(
            "accumulated passes need an epoch with a known end, which this stream lacks: pass "
            "AdaptiveLoader(..., epoch_samples=N), with at most one worker, or accumulate nothing"
        )
    if loader.delivery_size is None:
        loader.delivery_size = loader.batch_size
        loader.batch_size *= passes
    elif passes != 1:
        raise ArgumentError(
            f"{setting}={passes} and AdaptiveLoader(delivery_size={loader.delivery_size}) both set the samples of a "
            f"pass: leave out one of them, and if an earlier training set delivery_size, make a new loader"
        )
    most = loader.dataset_size or 0
    if loader.batch_size % loader.delivery_size and loader.batch_size < most:
        raise ArgumentError(
            f"batch_size={loader.batch_size} is no multiple of delivery_size={loader.delivery_size}, the samples of "
            f"a pass: choose a multiple"
        )


def state_of(control: Controller) -> dict[str, Any]:
    """Return the controller's state plus the number of samples of a pass."""
    return {**control.state_dict(), "delivery_size": control.loader.delivery_size}


def load_state(control: Controller, state: dict[str, Any]) -> None:
    """Load a state from `state_of`; raise if its passes had another number of samples."""
    state = dict(state)
    saved, here = state.pop("delivery_size", None), control.loader.delivery_size
    if saved != here:
        raise CheckpointError(
            f"a pass of an optimizer step had {saved or 'all'} samples in the checkpoint and has {here or 'all'} here: "
            f"begin with the same batch_size, delivery_size and number of accumulated passes"
        )
    control.load_state_dict(state)
