"""Optimizer steps of several backward passes, for frameworks that accumulate their gradients."""

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
    """Raise for anything but a policy, and for one that needs the epoch's loss, which adapters do not pass on."""
    require_policy(policy)
    if "loss" in policy.needs:
        raise ArgumentError(
            f"{type(policy).__name__} needs the epoch's mean training loss, which this adapter does not pass on: "
            f"use another policy, or a loop of your own with control.step(loss=...)"
        )


@dataclass(frozen=True)
class InMultiples(Around):
    """`policy`, with every size it chooses rounded down to a multiple of `unit`, the samples of one backward pass."""

    unit: int

    def next(self, seen: Measurement) -> Decision:
        return in_multiples(self.policy, seen, self.unit)


class PassCount(int):
    """The number of an optimizer step's passes, for a framework that finds the ends of steps by a remainder.

    Lightning and the Hugging Face Trainer count the passes of an epoch and end a step where `count % passes` is 0,
    which is right only if all steps of the epoch have equally many. The remainder of this number counts from the first
    pass of the present step, so that it is 0 where that step begins and ends. In everything else, and in checkpoints,
    it is a plain number.

    >>> passes = PassCount(4, before=3)  # three passes came before this step, which has four
    >>> [count % passes == 0 for count in (3, 4, 5, 6, 7)]
    [True, False, False, False, True]

    Args:
        number: The passes of a full step.
        before: Passes of the epoch before this step.
        made: The passes of this step: fewer than `number` if an epoch or the training ends. None: `number`.
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
    """The samples left of a training as long as `steps` of the first batch size, which a resume may change."""

    def __init__(self, steps: int, first_batch_size: Callable[[], int], loader: AdaptiveLoader) -> None:
        self.steps, self._first, self._loader = steps, first_batch_size, loader

    def samples_left(self) -> float:
        """Return the samples left in the current epoch, or in the next one between epochs; infinite before the last."""
        epochs, steps = self._length()
        current = self._loader.current
        is_over = current is not None and current.is_used_up
        epoch, samples = self._loader.epoch + is_over, 0 if current is None or is_over else current.samples
        if epoch != epochs:
            return math.inf if epoch < epochs else 0
        return max(0, steps * self._first() - samples)

    def _length(self) -> tuple[int, int]:
        # Whole epochs, and steps of one more.
        size, first = self._loader.dataset_size, self._first()
        if size is None:
            return self._loader.epoch, self.steps  # of a stream in its first pass
        passes = num_batches(size, self._loader.delivery_size or first, drop_last=self._loader.drop_last)
        return divmod(self.steps, math.ceil(passes / math.ceil(first / (self._loader.delivery_size or first))))


class StepPasses:
    """The division of optimizer steps into passes: their number, known before each step, and their weights.

    The loader delivers passes of `delivery_size` samples; its `batch_size` is that of a step. The last step of an epoch
    holds what is left of it, and its gradient is the mean over just these samples, as that of a short last batch.

    Args:
        control: The controller of the loader, which must deliver each pass after the backward pass before it.
        on_step: Called with the number of passes before the first one of each step is fetched.
        loss_reduction: How the loss of a pass is reduced over its samples, "mean" or "sum".
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
        """Whether passes were delivered whose step is still to come."""
        current = self._loader.current
        return current is not None and current is self._current and current.samples < self._end

    def _before_pass(self, current: EpochProgress) -> None:
        if current is self._current and current.samples < self._end:
            return
        delivered = current.cut_size
        # Counted in samples: an epoch's last pass may be short, and so may its last step.
        left = (self._loader.dataset_size or 0) - current.samples
        if self._loader.drop_last:
            left -= left % delivered
        self._samples = int(min(current.batch_size, left, self._samples_left()))
        self._count = math.ceil(self._samples / delivered)
        self._current, self._end = current, current.samples + self._samples
        self._on_step(self._count)

    def weigh(self, loss: Tensor) -> None:
        """Give the loss of the current pass its weight in the step, and mark the loss with it for meters.

        The framework has divided it by the number of passes, or will: right for passes of equal sizes, and for means.
        """
        shard = self._loader.rank_shard
        weight = LossWeight(1.0 if self._reduction == "sum" else shard.num_samples / self._samples)
        factor = weight * self._count
        if not math.isclose(factor, 1.0) and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * factor)
        weight.mark(loss)


def deliver_in_passes(loader: AdaptiveLoader, passes: int, setting: str) -> None:
    """Let `loader` deliver the passes of steps, at first `passes` of its batches each.

    A loader that has a `delivery_size` does so already, and the framework's `setting`, `passes`, must be 1.
    """
    if isinstance(loader.dataset, IterableDataset) and (loader.dataset_size is None or loader.num_workers > 1):
        raise ArgumentError(
            "accumulated passes need an epoch whose end is known, and this stream's is not: pass "
            "AdaptiveLoader(..., epoch_samples=N), with at most one worker, or accumulate nothing"
        )
    if loader.delivery_size is None:
        loader.delivery_size = loader.batch_size
        loader.batch_size *= passes
    elif passes != 1:
        raise ArgumentError(
            f"{setting}={passes} and AdaptiveLoader(delivery_size={loader.delivery_size}) both say how much of a step "
            f"one pass takes: leave out one of them, and if an earlier training set delivery_size, make a new loader"
        )
    most = loader.dataset_size or 0
    if loader.batch_size % loader.delivery_size and loader.batch_size < most:
        raise ArgumentError(
            f"batch_size={loader.batch_size} is no multiple of delivery_size={loader.delivery_size}, the samples of "
            f"one pass: choose one that is"
        )


def state_of(control: Controller) -> dict[str, Any]:
    """Return the controller's state, with the samples of a pass."""
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
