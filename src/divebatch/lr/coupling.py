"""How the learning rate follows the batch size, for every torch scheduler and for none.

The rate in force is always: the schedule's own rate x f(batch_size / base batch_size) x the decisions' factors.
The base is the first batch size, or the one that the rate was chosen for where that is another.
A scheduler computes its next rate from the present one (StepLR), from its own base rates (LambdaLR), or from both
(CosineAnnealingLR with eta_min). So a scheduler is only ever shown its own rates: its `step` finds them in the
parameter groups, and the factor is put back on when it is done.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from divebatch.errors import ArgumentError
from divebatch.lr.adam import ADAM_RULES, GroupSettings
from divebatch.lr.factors import BY_GAIN, Coupling, factor_of, require_known
from divebatch.lr.hand_set import HandSetRates, Reading
from divebatch.measurement import gain


class LrCoupling:
    """Keeps `param_groups[i]["lr"]` of one optimizer at the schedule's own rate times the batch size's factor.

    A rate that the user's loop writes is noticed before the optimizer's next step, and the factor put on it. With
    "adam" the groups' other settings follow too (`GroupSettings`).

    Args:
        optimizer: The optimizer whose rates follow.
        kind: A name of `COUPLINGS`, or a power of the batch size.
        first_batch_size: The batch size of the first step.
        base_batch_size: The one that the rates were chosen for; None for the first.
        hand_set_lr: How a rate that the loop writes is meant; None to find out.
        on_foreign: Is called before such a rate is taken in, and may refuse it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        kind: Coupling,
        first_batch_size: int,
        base_batch_size: int | None = None,
        hand_set_lr: Reading | None = None,
        on_foreign: Callable[[], None] = lambda: None,
    ) -> None:
        require_known(kind)
        self.optimizer, self.kind, self.first_batch_size = optimizer, kind, first_batch_size
        self.base_batch_size, self._has_base = base_batch_size or first_batch_size, base_batch_size is not None
        self._noise_scale: float | None = None
        """What was measured last, in samples."""
        self._first_noise_scale: float | None = None
        """What was measured first: the rates were chosen for the base batch at that noise."""
        self.gains = GainSum(self._gain(first_batch_size))
        """The sum of the gains of the steps so far."""
        self._batch_factor, self._decided_factor = self._batch_factor_at(first_batch_size), 1.0
        self._own = self.rates()
        self._highest_own = 0.0
        """The highest of the schedule's own rates of the first group so far: after a warm-up the one that it led to."""
        self._hand_set, self._on_foreign = HandSetRates(hand_set_lr), on_foreign
        self._replaced: dict[int, tuple[Any, float]] = {}
        """The rate that was in force before the loop's last write, and the schedule's own under it."""
        self._depth = 0
        self._settings = GroupSettings(
            optimizer, ADAM_RULES if kind == "adam" else {}, ratio=first_batch_size / self.base_batch_size
        )
        self._write(self.factor)

    @property
    def factor(self) -> float:
        """The number that multiplies the schedule's own rates at present."""
        return self._batch_factor * self._decided_factor

    @property
    def growth(self) -> float:
        """The factor over that of the first batch."""
        return self.factor / self._batch_factor_at(self.first_batch_size)

    def rates(self) -> list[float]:
        """The rates in force, one per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def own(self) -> float:
        """The schedule's own rate of the first group, as far as it was taken in."""
        return self._own[0]

    def schedule_ratio(self) -> float:
        """The schedule's own rate of the first group relative to its highest so far; NaN where that is zero."""
        self.take_in()
        return self._own[0] / self._highest_own if self._highest_own else math.nan

    def follow(
        self, batch_size: int, *, lr_factor: float = 1.0, noise_scale: float | None = None, step: int = 0
    ) -> None:
        """Put the rates where `batch_size` wants them; `lr_factor` stays in effect from now on.

        `noise_scale`, in samples, is what was measured last, where something was; `step` counts steps made so far.
        """
        if not 0 < lr_factor < math.inf:
            raise ArgumentError(f"lr_factor must be positive and finite, got lr_factor={lr_factor!r}")
        self.take_in()
        self._measured(noise_scale)
        self.gains.change(self._gain(batch_size), step)
        self._batch_factor = self._batch_factor_at(batch_size)
        self._decided_factor *= lr_factor
        self._settings.follow(batch_size / self.base_batch_size)
        self._write(self.factor)

    def _measured(self, noise_scale: float | None) -> None:
        # An infinite one is an estimate that found no signal, and 1 / (1 + B / b) would end training on it.
        if noise_scale is None or (noise_scale == math.inf and self.kind not in BY_GAIN):
            return
        self._noise_scale = max(0.0, noise_scale)
        if self._first_noise_scale is None:
            self._first_noise_scale = self._noise_scale

    def begin_at(self, batch_size: int) -> None:
        """Take `batch_size` for the size that training began with: it turned out to be another before any change.

        The rate that was found at the beginning belongs to it, unless a base was given.
        """
        self.take_in()
        if not self._has_base:
            self.base_batch_size = batch_size
        self.first_batch_size = batch_size
        self.gains = GainSum(self._gain(batch_size))
        self._batch_factor = self._batch_factor_at(batch_size)
        self._settings.follow(batch_size / self.base_batch_size)
        self._write(self.factor)

    def _batch_factor_at(self, batch_size: int) -> float:
        noise, first_noise = self._per_base(self._noise_scale), self._per_base(self._first_noise_scale)
        return self._factor_at(batch_size / self.base_batch_size, noise, first_noise)

    def _factor_at(self, ratio: float, noise: float | None, first_noise: float | None) -> float:
        # Over what it is for the base batch at the noise first measured, which is 1 for all but 1 / (1 + B / b).
        return factor_of(self.kind, ratio, noise) / factor_of(self.kind, 1.0, first_noise)

    def _gain(self, batch_size: int) -> float:
        return self._gain_at(batch_size / self.base_batch_size, self._per_base(self._noise_scale))

    def _gain_at(self, ratio: float, noise: float | None) -> float:
        return gain(ratio, noise) if self.kind in BY_GAIN else 1.0

    def _per_base(self, noise_scale: float | None) -> float | None:
        return None if noise_scale is None else noise_scale / self.base_batch_size

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own rates and settings, and the factors; those in force follow from them."""
        self.take_in()
        return {
            "kind": self.kind,
            "first_batch_size": self.first_batch_size,
            "batch_factor": self._batch_factor,
            "decided_factor": self._decided_factor,
            "own": list(self._own),
            "highest_own": self._highest_own,
            "base_batch_size": self.base_batch_size,
            "noise_scale": self._noise_scale,
            "first_noise_scale": self._first_noise_scale,
            "gains": self.gains.state_dict(),
            "hand_set": self._hand_set.state_dict(),
            "settings": self._settings.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another coupling stood. Optimizer and scheduler may be loaded before or after."""
        self.first_batch_size, self._highest_own = state["first_batch_size"], state["highest_own"]
        self._batch_factor, self._decided_factor = state["batch_factor"], state["decided_factor"]
        self._own = list(state["own"])
        self.base_batch_size = state["base_batch_size"]
        self._noise_scale, self._first_noise_scale = state["noise_scale"], state["first_noise_scale"]
        self.gains = GainSum(**state["gains"])
        self._hand_set.load_state_dict(state["hand_set"])
        self._settings.load_state_dict(state["settings"])
        self._write(self.factor)

    @property
    def is_with_scheduler(self) -> bool:
        """Whether a scheduler's step is under way."""
        return self._depth > 0

    @contextmanager
    def own_rates(self) -> Iterator[None]:
        """Inside, the parameter groups show the schedule's own rates and settings. Nested schedulers enter once."""
        if self._depth == 0:
            self.take_in()
            self._write(1.0)
            self._settings.show_own()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._own = self.rates()
                self._write(self.factor)
                self._settings.show_in_force()

    def put_own_back(self) -> None:
        """Leave the parameter groups with the schedule's own rates and settings."""
        self.take_in()
        self._write(1.0)
        self._settings.follow(1.0)

    def _write(self, factor: float) -> None:
        self._highest_own = max(self._highest_own, self._own[0])
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                # In place: a captured or compiled optimizer step reads the rate from this tensor.
                group["lr"].fill_(own * factor)
            else:
                group["lr"] = own * factor
        self._put = list(map(_mark, self.optimizer.param_groups))
        """What was put into the groups, to know it from what others put there, were it the same number."""

    def take_in(self) -> None:
        """Make rates and settings that were written by others the own ones, and put the factor on them."""
        self._settings.take_in()
        found = [index for index, group in enumerate(self.optimizer.param_groups) if not self._is_ours(index, group)]
        if any(index < len(self._own) for index in found):
            self._on_foreign()
        for index in found:
            rate = float(self.optimizer.param_groups[index]["lr"])
            if index >= len(self._own):  # a group added later comes with the rate of its schedule's own
                self._own.append(rate)
                continue
            self._own[index] = self._own_of(index, rate)
        if found:
            self._write(self.factor)

    def _own_of(self, index: int, written: float) -> float:
        """The schedule's own rate where the loop wrote `written`."""
        lr, own = self._replaced.get(index, (None, 0.0))
        # A loop that set the rate aside puts the very same object back. Tensors are written to in place.
        if self.optimizer.param_groups[index]["lr"] is lr and not isinstance(lr, torch.Tensor):
            return own
        self._replaced[index] = self._put[index][0], self._own[index]
        return self._hand_set.own_rate(index, written, own=self._own[index], factor=self.factor)

    def _is_ours(self, index: int, group: dict[str, Any]) -> bool:
        if index >= len(self._put):
            return False
        lr, version = self._put[index]
        return group["lr"] is lr and _mark(group)[1] == version

    def was_loaded(self) -> None:
        """The optimizer has loaded a state: its rates are those that were in force when it was saved."""
        self._settings.was_loaded()
        if len(self._own) == len(self.optimizer.param_groups):
            self._own = [
                own if _same(rate, own * self.factor) else rate / self.factor
                for rate, own in zip(self.rates(), self._own, strict=True)
            ]
            self._put = list(map(_mark, self.optimizer.param_groups))


def _mark(group: dict[str, Any]) -> tuple[Any, int]:
    """The very object that holds a group's rate, and how often it was written to in place."""
    lr = group["lr"]
    return lr, lr._version if isinstance(lr, torch.Tensor) else 0


def _same(rate: float, other: float) -> bool:
    """Whether they are one number: tensors may hold it in single precision."""
    return math.isclose(rate, other, rel_tol=1e-6)


@dataclass(slots=True)
class GainSum:
    """The sum over steps of the gain in force: how many steps at the base batch they were worth."""

    gain: float
    """The gain in force."""
    before: float = 0.0
    """The sum over the first `steps` steps."""
    steps: int = 0
    handed_out: int = 0
    """Steps that schedulers were told to make."""

    def at(self, step: int) -> float:
        """Return the sum after `step` steps."""
        if step < self.steps:  # an epoch was broken off and began again: what was made of it does not count
            return self.before * step / self.steps
        return self.before + (step - self.steps) * self.gain

    def change(self, gain: float, step: int) -> None:
        """Put another gain in force from `step` on."""
        self.before, self.steps, self.gain = self.at(step), step, gain

    def due(self, step: int) -> int:
        """Return how many whole steps have come together since the last call."""
        # The sum of many gains may stay a rounding error below the whole number it stands for.
        due = max(0, math.floor(self.at(step) + 1e-9) - self.handed_out)
        self.handed_out += due
        return due

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers."""
        return asdict(self)
