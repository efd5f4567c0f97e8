"""The learning rates of all optimizers: each follows the batch size by its own coupling; schedules go by samples."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from divebatch.checks import warn_user
from divebatch.data.loader import AdaptiveLoader
from divebatch.lr.adopted_scheduler import Adopted
from divebatch.lr.coupling import GainSum, LrCoupling
from divebatch.lr.factors import BY_GAIN, BY_NOISE, Coupling
from divebatch.lr.hand_set import Reading
from divebatch.lr.schedule_steps import ScheduleIn, ScheduleSteps
from divebatch.lr.schedulers_found import require_all_schedulers
from divebatch.measurement import Decision, Measurement

A_COURSE = 3
"""So many steps in succession with rates that the loop wrote make a course."""


class Rates:
    """Keeps the rates of all optimizers where schedules and batch size want them.

    Args:
        optimizers: Those whose rates follow.
        schedulers: All that drive them.
        kinds: Each optimizer's coupling.
        loader: Delivers the samples.
        first_batch_size: The samples of an optimizer step at the beginning.
        base_batch_size: Those that the rates were chosen for; None for the first.
        schedule_in: What a call of a scheduler's `step` stands for; None to find out.
        hand_set_lr: How a rate that the loop writes is meant; None to find out.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        *,
        kinds: Sequence[Coupling],
        loader: AdaptiveLoader,
        first_batch_size: int,
        base_batch_size: int | None = None,
        schedule_in: ScheduleIn | None = None,
        hand_set_lr: Reading | None = None,
    ) -> None:
        require_all_schedulers(optimizers, schedulers)
        self._optimizers, self._schedulers, self._loader = optimizers, schedulers, loader
        self._schedule_in, self._has_warned = schedule_in, False
        self.batch_size = first_batch_size
        """The size that the rates follow at present."""
        self._couplings = [
            LrCoupling(
                optimizer,
                kind=kind,
                first_batch_size=first_batch_size,
                base_batch_size=base_batch_size,
                hand_set_lr=hand_set_lr,
                on_foreign=self._refuse_unknown_schedulers,
            )
            for optimizer, kind in zip(optimizers, kinds, strict=True)
        ]
        self._steps = [ScheduleSteps(type(each).__name__, loader, schedule_in) for each in schedulers]
        self._looked_for_schedulers = False
        self._moves = 0
        """How many steps in succession had a rate that the loop wrote, another than the one before."""
        self._epoch_lr, self._is_used = self.lr, False
        self._adopted = [
            Adopted(each, steps, self._own_rates) for each, steps in zip(schedulers, self._steps, strict=True)
        ]
        self._undo: list[Callable[[], None]] = [
            *(each.release for each in self._adopted),
            *(undo for coupling in self._couplings for undo in self._listen(coupling)),
        ]

    # What is in force

    @property
    def lr(self) -> float:
        """The rate in force of the first optimizer's first parameter group."""
        return self._first.rates()[0]

    @property
    def epoch_lr(self) -> float:
        """That of the first step since `mark`; before that step the one which was in force then."""
        return self._epoch_lr

    def mark(self) -> None:
        """An epoch begins, or another batch size is in force."""
        self._epoch_lr, self._is_used = self.lr, False

    @property
    def _first(self) -> LrCoupling:
        return self._couplings[0]

    @property
    def kind(self) -> Coupling:
        """How the first optimizer's rate follows the batch size."""
        return self._first.kind

    @property
    def first_batch_size(self) -> int:
        """The batch size that training began with."""
        return self._first.first_batch_size

    @property
    def gains(self) -> GainSum:
        """The sum of AdaScale's gains, of the first optimizer that has one."""
        return next((each for each in self._couplings if each.kind in BY_GAIN), self._first).gains

    def schedule_ratio(self) -> float:
        """The schedule's own rate of the first optimizer's first group relative to its highest; NaN for zero."""
        return self._first.schedule_ratio()

    @property
    def growth(self) -> float:
        """The first optimizer's rate in force over the schedule's own, relative to the first batch."""
        return self._first.growth

    # Following

    def follow(
        self, batch_size: int, *, lr_factor: float = 1.0, noise_scale: float | None = None, step: int = 0
    ) -> None:
        """Put all rates where `batch_size` wants them; `lr_factor` stays in effect from now on.

        `noise_scale`, in samples, is what was measured last, where something was; `step` counts steps made so far.
        """
        for coupling in self._couplings:
            coupling.follow(batch_size, lr_factor=lr_factor, noise_scale=noise_scale, step=step)
        if batch_size != self.batch_size:
            self._warn_of_a_course_by_steps(batch_size)
        self.batch_size = batch_size

    def follow_decision(self, decision: Decision, seen: Measurement) -> None:
        """Put all rates where the decision, and for some couplings the noise, wants them."""
        noise_scale = math.nan if seen.diversity is None else seen.diversity.noise_scale
        needs_noise = any(each.kind in BY_NOISE for each in self._couplings)
        known = noise_scale if needs_noise and not math.isnan(noise_scale) else None
        self.follow(decision.batch_size, lr_factor=decision.lr_factor, noise_scale=known, step=seen.step)

    def catch_up(self, batch_size: int, step: int) -> bool:
        """Follow the size that is in force from now on, were it set by hand; whether it is another one."""
        is_another = batch_size != self.batch_size
        if is_another:
            self.follow(batch_size, step=step)
        return is_another

    def begin_at(self, batch_size: int) -> None:
        """Take `batch_size` for the size that training began with: it turned out to be another before any change."""
        for coupling in self._couplings:
            coupling.begin_at(batch_size)
        self.batch_size = batch_size
        self.mark()

    def take_scheduler_steps(self, step: int) -> int:
        """Return how many steps the gains make due after `step`; who asks steps the schedulers, one step a call."""
        for steps in self._steps:
            steps.schedule_in = "calls"
        return self.gains.due(step)

    def _warn_of_a_course_by_steps(self, batch_size: int) -> None:
        if self._moves < A_COURSE or self._schedule_in is not None or self._has_warned:
            return
        self._has_warned = True
        first = self.first_batch_size
        warn_user(
            f"the batch size goes from {self.batch_size} to {batch_size}, and your loop writes group['lr'] at every "
            f"step: a course that counts steps will not reach its end. Let that line count samples: "
            f"lr_at(loader.samples_delivered // {first}) in place of lr_at(step). If it does, or if steps are what it "
            f"shall count, pass Controller(..., schedule_in='calls')"
        )

    def end_epoch(self) -> None:
        """Bring schedulers to the epoch's end that no call has brought there."""
        self._looked_for_schedulers = False
        for each in self._adopted:
            each.end_epoch()

    @contextmanager
    def _own_rates(self, scheduler: Any) -> Iterator[bool]:
        """Inside, the groups show the schedule's own rates. Whether a scheduler around this one is at work already."""
        driven = getattr(scheduler, "optimizer", None)
        couplings = [each for each in self._couplings if driven in (None, each.optimizer)]
        is_nested = any(each.is_with_scheduler for each in couplings)
        with ExitStack() as stack:
            for coupling in couplings:
                stack.enter_context(coupling.own_rates())
            yield is_nested

    def _listen(self, coupling: LrCoupling) -> list[Callable[[], None]]:
        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer is coupling.optimizer:  # and not a deep copy, which has the hook too
                self._before_step(coupling)

        def after_load(optimizer: Optimizer) -> None:
            if optimizer is coupling.optimizer:
                coupling.was_loaded()

        # A compiled optimizer step runs this as it is: it looks at objects, which are nothing for a graph.
        before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        optimizer = coupling.optimizer
        handles = (
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_load_state_dict_post_hook(after_load),
        )
        return [handle.remove for handle in handles]

    def _before_step(self, coupling: LrCoupling) -> None:
        """The optimizer is about to use its rates."""
        before = coupling.own
        coupling.take_in()
        if coupling is not self._first:
            return
        if self._moves < A_COURSE:
            self._moves = self._moves + 1 if coupling.own != before else 0
        if not self._is_used:
            self._epoch_lr, self._is_used = self.lr, True

    def _refuse_unknown_schedulers(self) -> None:
        """A scheduler made since would undo the coupling. Looked for once an epoch: it takes a while."""
        if not self._looked_for_schedulers:
            require_all_schedulers(self._optimizers, self._schedulers)
            self._looked_for_schedulers = True

    def close(self) -> None:
        """Take all hooks off. Rates and settings stay as they are in the groups: training may go on with them."""
        while self._undo:
            self._undo.pop()()

    def put_own_back(self) -> None:
        """Give the groups the own rates and settings, for a training that begins anew with the first batch size."""
        for coupling in self._couplings:
            coupling.put_own_back()

    # State

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the saved one."""
        return {
            "lr_coupling": [each.kind for each in self._couplings],
            "parameter_groups": [len(each.optimizer.param_groups) for each in self._couplings],
            "schedulers": len(self._schedulers),
        }

    def state_dict(self) -> dict[str, Any]:
        """The schedules' own rates, the factors and how far the schedulers have come."""
        return {
            "couplings": [coupling.state_dict() for coupling in self._couplings],
            "steps": [steps.state_dict() for steps in self._steps],
            "batch_size": self.batch_size,
            "epoch_lr": self._epoch_lr,
            "is_used": self._is_used,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where others stood. Optimizers and schedulers may be loaded before or after."""
        for part, saved in zip(self._couplings, state["couplings"], strict=True):
            part.load_state_dict(saved)
        for steps, saved in zip(self._steps, state["steps"], strict=True):
            steps.load_state_dict(saved)
        self.batch_size = state["batch_size"]
        self._epoch_lr, self._is_used = state["epoch_lr"], state["is_used"]
