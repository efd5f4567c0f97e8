"""How the learning rate follows the batch size, for every torch scheduler and for none.

The rate in force is always: the schedule's own rate x f(batch_size / base batch_size) x the decisions' factors.
The base is the first batch size, or the one that the rate was chosen for where that is another.
A scheduler computes its next rate from the present one (StepLR), from its own base rates (LambdaLR), or from both
(CosineAnnealingLR with eta_min). So a scheduler is only ever shown its own rates: its `step` finds them in the
parameter groups, and the factor is put back on when it is done.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.measurement import gain

CouplingName = Literal["none", "linear", "sqrt", "adascale", "adascale-sqrt"]

COUPLINGS: dict[str, Callable[[float, float | None], float]] = {
    "none": lambda ratio, noise: 1.0,
    "linear": lambda ratio, noise: ratio,
    "sqrt": lambda ratio, noise: math.sqrt(ratio),
    "adascale": gain,
    "adascale-sqrt": lambda ratio, noise: math.sqrt(gain(ratio, noise)),
}
"""f(batch_size / base, noise): `linear` keeps lr / batch_size (SGD, Goyal 2017), `sqrt` suits Adam-like rules.

`adascale` follows what was measured, `adascale-sqrt` is the same for Adam-like rules.
"""
BY_NOISE = frozenset({"adascale", "adascale-sqrt"})
"""Those that must know the noise scale."""
BY_OPTIMIZER = ("linear", "sqrt")
"""Those of which one suits the optimizer: see `coupling_for`."""
_ADAM_LIKE = tuple(
    kind
    for name in (
        *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam"),
        *("RMSprop", "Adagrad", "Adadelta", "Adafactor", "Muon"),
    )
    if (kind := getattr(torch.optim, name, None)) is not None  # older versions of torch lack the last two
)


def coupling_for(optimizer: Optimizer) -> Literal["linear", "sqrt"]:
    """Return "linear" for SGD and "sqrt" for Adam-like optimizers, whose step does not grow with the gradient."""
    # By type and not by name: a user's subclass of Adam is Adam-like too.
    if isinstance(optimizer, _ADAM_LIKE):
        return "sqrt"
    if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD):
        return "linear"
    raise ArgumentError(
        f"{type(optimizer).__name__} is no optimizer of torch.optim for which it is known how the learning rate must "
        f"follow the batch size: pass Auto(..., lr_coupling='sqrt') if it is Adam-like, 'linear' if it is like SGD"
    )


class LrCoupling:
    """Keeps `param_groups[i]["lr"]` at the schedule's own rate times the batch size's factor."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        *,
        kind: str,
        first_batch_size: int,
        base_batch_size: int | None = None,
    ) -> None:
        require_choice("lr_coupling", kind, tuple(COUPLINGS))
        _require_all_schedulers(optimizer, schedulers)
        self._schedulers = schedulers
        self.optimizer, self.kind, self.first_batch_size = optimizer, kind, first_batch_size
        self.base_batch_size, self._has_base = base_batch_size or first_batch_size, base_batch_size is not None
        self._noise_scale: float | None = None
        self.gains = GainSum(self._gain(first_batch_size))
        """The sum of the gains of the steps so far."""
        self._batch_factor, self._decided_factor = self._batch_factor_at(first_batch_size), 1.0
        self._own = self.rates()
        self._applied = list(self._own)
        self._first_own = self._own[0]
        self._depth = 0
        self._write(self.factor)
        self._released = [self._adopt(scheduler) for scheduler in schedulers]

    @property
    def factor(self) -> float:
        """The number that multiplies the schedule's own rates at present."""
        return self._batch_factor * self._decided_factor

    def rates(self) -> list[float]:
        """The rates in force, one per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def schedule_ratio(self) -> float:
        """The schedule's own rate of the first group relative to its first one; NaN where that is zero."""
        self._notice_foreign_changes()
        return self._own[0] / self._first_own if self._first_own else math.nan

    def follow(
        self, batch_size: int, *, lr_factor: float = 1.0, noise_scale: float | None = None, step: int = 0
    ) -> None:
        """Put the rates where `batch_size` wants them; `lr_factor` stays in effect from now on.

        `noise_scale`, in samples, is what was measured last, where something was; `step` counts steps made so far.
        """
        if not 0 < lr_factor < math.inf:
            raise ArgumentError(f"lr_factor must be positive and finite, got lr_factor={lr_factor!r}")
        self._notice_foreign_changes()
        self._noise_scale = self._noise_scale if noise_scale is None else max(0.0, noise_scale)
        self.gains.change(self._gain(batch_size), step)
        self._batch_factor = self._batch_factor_at(batch_size)
        self._decided_factor *= lr_factor
        self._write(self.factor)

    def begin_at(self, batch_size: int) -> None:
        """Take `batch_size` for the size that training began with: it turned out to be another before any change.

        The rate that was found at the beginning belongs to it, unless a base was given.
        """
        if not self._has_base:
            self.base_batch_size = batch_size
        self.first_batch_size = batch_size
        self.gains = GainSum(self._gain(batch_size))
        self._notice_foreign_changes()
        self._batch_factor = self._batch_factor_at(batch_size)
        self._write(self.factor)

    def _batch_factor_at(self, batch_size: int) -> float:
        return COUPLINGS[self.kind](batch_size / self.base_batch_size, self._noise)

    def _gain(self, batch_size: int) -> float:
        return gain(batch_size / self.base_batch_size, self._noise) if self.kind in BY_NOISE else 1.0

    @property
    def _noise(self) -> float | None:
        return None if self._noise_scale is None else self._noise_scale / self.base_batch_size

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own rates and the factors; the rates in force are their product."""
        self._notice_foreign_changes()
        return {
            "kind": self.kind,
            "first_batch_size": self.first_batch_size,
            "batch_factor": self._batch_factor,
            "decided_factor": self._decided_factor,
            "own": list(self._own),
            "first_own": self._first_own,
            "base_batch_size": self.base_batch_size,
            "noise_scale": self._noise_scale,
            "gains": self.gains.state_dict(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded here."""
        if state["kind"] != self.kind:
            raise CheckpointError(f"the checkpoint has lr_coupling={state['kind']!r}, this run {self.kind!r}")
        if len(state["own"]) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint has {len(state['own'])} parameter groups, "
                f"the optimizer {len(self.optimizer.param_groups)}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another coupling stood. Optimizer and scheduler may be loaded before or after."""
        self.check_state(state)
        self.first_batch_size, self._first_own = state["first_batch_size"], state["first_own"]
        self._batch_factor, self._decided_factor = state["batch_factor"], state["decided_factor"]
        self._own = list(state["own"])
        self.base_batch_size, self._noise_scale = state["base_batch_size"], state["noise_scale"]
        self.gains = GainSum(**state["gains"])
        self._write(self.factor)

    def close(self) -> None:
        """Give the schedulers back their own `step`. The rates stay as they are."""
        while self._released:
            self._released.pop()()

    @contextmanager
    def _own_rates(self) -> Iterator[None]:
        """Inside, the parameter groups show the schedule's own rates. Nested schedulers enter once."""
        if self._depth == 0:
            self._notice_foreign_changes()
            self._write(1.0)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._own = self.rates()
                self._write(self.factor)

    def _write(self, factor: float) -> None:
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                # In place: a captured or compiled optimizer step reads the rate from this tensor.
                group["lr"].fill_(own * factor)
            else:
                group["lr"] = own * factor
        self._applied = self.rates()

    def _notice_foreign_changes(self) -> None:
        """A rate that is not the one put there was set by hand: from then on it is the schedule's own."""
        for index, rate in enumerate(self.rates()):
            if index >= len(self._own):
                self._own.append(rate / self.factor)
                self._applied.append(rate)
            elif rate != self._applied[index]:
                _require_all_schedulers(self.optimizer, self._schedulers)  # or a scheduler made since did it
                self._own[index] = rate / self.factor

    def _adopt(self, scheduler: Any) -> Callable[[], None]:
        """Let `scheduler.step` see its own rates; returns what undoes it.

        A subclass made on the spot, since an attribute on the instance would end up in its `state_dict`.
        """
        coupling, kind = self, type(scheduler)

        class Coupled(kind):  # type: ignore[misc, valid-type]
            def step(self, *args: Any, **kwargs: Any) -> Any:
                with coupling._own_rates():
                    return super().step(*args, **kwargs)

        Coupled.__name__, Coupled.__qualname__ = kind.__name__, kind.__qualname__
        # Not a wrapper around `step`: an attribute of the instance would be saved with the scheduler.
        scheduler.__class__ = Coupled

        def release() -> None:
            scheduler.__class__ = kind

        return release


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


def _require_all_schedulers(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Raise for a scheduler of another optimizer, and for one that was not passed: it would undo the coupling."""
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            raise ArgumentError(f"scheduler {type(scheduler).__name__} does not drive the optimizer that was passed")
    passed = {id(part) for scheduler in schedulers for part in _with_parts(scheduler)}
    missing = sorted({type(found).__name__ for found in _living(optimizer) if id(found) not in passed})
    if missing:
        raise ArgumentError(
            f"the optimizer has a scheduler that was not passed: {', '.join(missing)}. "
            f"Pass scheduler=... (a list for several) so that the learning rate stays right."
        )


def _living(optimizer: Optimizer) -> list[LRScheduler]:
    # An optimizer does not know its schedulers (ReduceLROnPlateau leaves no trace on it at all); the garbage
    # collector does. type() and not isinstance(), which would wake lazy objects; some 60 ms, once a run.
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), LRScheduler) and getattr(found, "optimizer", None) is optimizer
    ]


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)
