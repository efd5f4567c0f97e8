"""Learning rates that follow the batch size, with any scheduler or none.

`group["lr"]` always holds the schedule's own rate. The hook before an optimizer step multiplies that rate by
f(batch_size / base batch size) and by the decisions' factors. The hook after the step puts the same value back. So
schedulers, loops that write rates, loggers and saved optimizers see what they would see without a controller. With
"adam" and "adam-beta1", Adam's other settings change for the step in the same way.

A scheduler stepped after every optimizer step (`scheduler_unit="step"`) was made for the number of steps at the first
batch size. `Schedule` makes the steps that are missing according to the samples seen.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adam, Adamax, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from divebatch.checks import require_choice, require_coupling_power, warn_user
from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import num_batches
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Decision, Measurement, gain
from divebatch.norms.sharded import is_sharded
from divebatch.policies import Policy

# Couplings

CouplingName = Literal["none", "linear", "sqrt", "adam", "adam-beta1", "adascale", "adascale-sqrt", "1/(1+B/b)"]
Coupling = CouplingName | float
"""A name, or a number p for the p-th power of the batch size."""

COUPLINGS: dict[str, Callable[[float, float | None], float]] = {
    "none": lambda ratio, noise: 1.0,
    "linear": lambda ratio, noise: ratio,
    "sqrt": lambda ratio, noise: math.sqrt(ratio),
    "adam": lambda ratio, noise: math.sqrt(ratio),
    "adam-beta1": lambda ratio, noise: math.sqrt(ratio),
    "adascale": gain,
    "adascale-sqrt": lambda ratio, noise: math.sqrt(gain(ratio, noise)),
    "1/(1+B/b)": lambda ratio, noise: 1.0 if noise is None else 1 / (1 + noise / ratio),
}
"""f(batch_size / base, noise scale / base) for each name.

"linear" keeps lr / batch_size constant (SGD, Goyal 2017), and "sqrt" suits Adam-like rules. "adam" and "adam-beta1"
also change other settings of Adam (`ADAM_RULES`). "adascale" follows measurements, and "adascale-sqrt" is the same for
Adam-like rules. "1/(1+B/b)" is SGD's best rate at batch size b and noise scale B (McCandlish et al. 2018), relative to
the best rate without noise.
"""
BY_GAIN = frozenset({"adascale", "adascale-sqrt"})
"""Couplings that value each step by its gain (`GainSum`)."""
BY_NOISE = BY_GAIN | {"1/(1+B/b)"}
"""Couplings that need the noise scale."""
BY_SIZE = ("linear", "sqrt", "adam", "adam-beta1")
"""Couplings that follow a power of the batch size, as every number does."""

Rule = Callable[[Any, float], Any]
"""(own value, k) -> the value at k times the base batch size."""


def _power(beta: Any, k: float) -> Any:
    return beta**k  # a mean forgets as much after as many samples


ADAM_RULES: Mapping[str, Mapping[str, Rule | tuple[Rule, Rule]]] = {
    "adam": {
        "betas": (_power, _power),
        "eps": lambda eps, k: eps / math.sqrt(k),  # shrinks like the root of the second moment
        "weight_decay": lambda decay, k: decay * math.sqrt(k),  # keeps lr * weight_decay / batch_size
        "momentum_decay": lambda decay, k: decay * k,  # NAdam's, per step
    },
    "adam-beta1": {"betas": (_power, lambda beta, k: beta)},
}
"""The rule for each setting of a parameter group under a coupling, if the group has the setting.

"adam": Malladi et al. 2022 (Adam's stochastic differential equation), Marek et al. 2025 (half-lives in samples),
Bergsma et al. 2025 (weight decay). "adam-beta1": a batch that grows late leaves few steps, and a mean over ten of them
would lag behind the falling rate (docs/when-it-pays.md).
"""
_ADAM_KNOWN = (Adam, AdamW, Adamax, NAdam)
"""The optimizers of `ADAM_RULES`. RAdam stops dividing by the second moment if beta2 is small, and SparseAdam's rows
decay only when they are used."""
_ADAM_LIKE = tuple(
    kind
    for name in (
        *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam"),
        *("RMSprop", "Adagrad", "Adadelta", "Adafactor", "Muon"),
    )
    if (kind := getattr(torch.optim, name, None)) is not None  # older versions of torch lack the last two
)


def require_known(coupling: Coupling) -> None:
    """Raise if `coupling` is unknown."""
    if not isinstance(coupling, str):
        require_coupling_power("lr_coupling", coupling)
    elif coupling not in COUPLINGS:
        raise ArgumentError(
            f"unknown lr_coupling {coupling!r}; known: {', '.join(COUPLINGS)}, or a power of the batch size such as 0.6"
        )


def factor_of(coupling: Coupling, ratio: float, noise: float | None = None) -> float:
    """Return the factor of the rate at `ratio` base batches; `noise` is the noise scale in base batches, if known."""
    return COUPLINGS[coupling](ratio, noise) if isinstance(coupling, str) else float(ratio**coupling)


def coupling_for(optimizer: Optimizer) -> Literal["linear", "sqrt"]:
    """Return "linear" for SGD and "sqrt" for Adam-like optimizers, whose step does not grow with the gradient."""
    # By type and not by name: a user's subclass of Adam is Adam-like too.
    if isinstance(optimizer, _ADAM_LIKE):
        return "sqrt"
    if isinstance(optimizer, SGD | ASGD):
        return "linear"
    raise ArgumentError(
        f"{type(optimizer).__name__} is no optimizer of torch.optim for which it is known how its rate must follow: "
        f"pass Controller(..., lr_coupling='sqrt') if it is Adam-like, 'linear' if it is like SGD, or a list with a "
        f"name for each of several optimizers"
    )


def require_adam(optimizer: Optimizer) -> None:
    """Raise if `ADAM_RULES` were not made for this optimizer."""
    if isinstance(optimizer, _ADAM_KNOWN):
        return
    known = ", ".join(kind.__name__ for kind in _ADAM_KNOWN)
    other = "linear" if isinstance(optimizer, SGD | ASGD) else "sqrt"
    raise ArgumentError(
        f"this lr_coupling also sets betas, for torch's {known}, and {type(optimizer).__name__} is none of them: pass "
        f"lr_coupling={other!r}, which changes only the learning rate; for several optimizers pass a list"
    )


def couplings_of(
    policy: Policy, lr_coupling: Coupling | Sequence[Coupling] | None, optimizers: Sequence[Optimizer]
) -> list[Coupling]:
    """Return each optimizer's coupling: as given, else the policy's, else "none"."""
    if lr_coupling is None and policy.lr_coupling is None and policy.needs_lr_coupling:
        # Linear for SGD, the square root for Adam-like optimizers, and the policy's own for torch's Adam variants.
        of_adam: Any = policy.adam_coupling
        suiting = [coupling_for(each) for each in optimizers]
        return [of_adam if isinstance(o, _ADAM_KNOWN) else suits for o, suits in zip(optimizers, suiting, strict=True)]
    named = policy.lr_coupling or "none" if lr_coupling is None else lr_coupling
    couplings: list[Any] = [named] * len(optimizers) if isinstance(named, str | int | float) else list(named)
    if len(couplings) != len(optimizers):
        raise ArgumentError(
            f"lr_coupling must have one name for each of the {len(optimizers)} optimizers, got {len(couplings)}: "
            f"{couplings}"
        )
    if lr_coupling is not None:
        for coupling in couplings:
            require_coupling(policy, coupling)
    for coupling, optimizer in zip(couplings, optimizers, strict=True):
        if coupling in ADAM_RULES:
            require_adam(optimizer)
    return couplings


def require_coupling(policy: Policy, lr_coupling: Coupling) -> None:
    """Raise if the coupling does not exist, or the policy is made for another one."""
    require_known(lr_coupling)
    fits: tuple[Any, ...] = BY_SIZE if policy.lr_coupling is None else (policy.lr_coupling,)
    is_free = policy.lr_coupling is None and not (policy.needs_lr_coupling and isinstance(lr_coupling, str))
    if not is_free and lr_coupling not in fits:
        raise ArgumentError(
            f"{type(policy).__name__} moves the learning rate with the batch size: leave lr_coupling out, or pass "
            f"lr_coupling={' or '.join(map(repr, fits))}, got lr_coupling={lr_coupling!r}"
        )


def scale_settings(optimizer: Optimizer, ratio: float) -> None:
    """Change the Adam settings of an optimizer without a coupling for good, to a batch `ratio` times as large."""
    require_adam(optimizer)
    for group in optimizer.param_groups:
        for name, rule in _rules_of("adam", group):
            group[name] = _put(group[name], rule, ratio)[1]
    _count_steps_in(optimizer, ratio)


def _count_steps_in(optimizer: Optimizer, ratio: float) -> None:
    """Convert the step count to steps of `ratio` times as many samples.

    Adam divides its means by 1 - beta^step, the sum of their weights, with the current beta. If the steps so far used
    another beta, (beta^ratio)^(step / ratio) is the true remainder.
    """
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor):
            step.div_(ratio)


def _rules_of(kind: Any, group: Mapping[str, Any]) -> list[tuple[str, Rule | tuple[Rule, Rule]]]:
    # An L2 penalty is a part of the loss, which the batch size must not change.
    has_penalty = not group.get("decoupled_weight_decay")
    rules = ((name, rule) for name, rule in ADAM_RULES[kind].items() if name in group)
    return [(name, rule) for name, rule in rules if not (name == "weight_decay" and has_penalty)]


# One optimizer


@dataclass(slots=True)
class GainSum:
    """The sum of AdaScale's gains over steps, in steps at the base batch size."""

    gain: float
    """The current gain."""
    before: float = 0.0
    """The sum over the first `steps` steps."""
    steps: int = 0
    handed_out: int = 0
    """The number of steps that schedulers were told to make."""

    def at(self, step: int) -> float:
        """Return the sum after `step` steps."""
        if step < self.steps:  # an epoch that was left early began again: its steps do not count
            return self.before * step / self.steps
        return self.before + (step - self.steps) * self.gain

    def change(self, gain: float, step: int) -> None:
        """Use another gain from `step` on."""
        self.before, self.steps, self.gain = self.at(step), step, gain

    def due(self, step: int) -> int:
        """Return the number of whole steps that became due since the last call."""
        # The sum of many gains may be a rounding error below the whole number that is meant.
        due = max(0, math.floor(self.at(step) + 1e-9) - self.handed_out)
        self.handed_out += due
        return due


class LrCoupling:
    """The learning rates of one optimizer, and Adam's settings, changed for the duration of a step.

    `kind` is a name of `COUPLINGS`, or a power of the batch size. If the loss is a "sum" over the batch, the gradient
    grows with the batch. The rate of an optimizer that does not normalize gradients then follows by one power less.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        kind: Coupling,
        first_batch_size: int,
        base_batch_size: int | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        require_known(kind)
        self.optimizer, self.kind = optimizer, kind
        self.base_batch_size = base_batch_size or first_batch_size
        self.is_of_sum = loss_reduction == "sum" and kind != "none" and not isinstance(optimizer, _ADAM_LIKE)
        """Whether the steps grow with the batch by themselves."""
        self._noise_scale: float | None = None
        """The latest measured noise scale, in samples."""
        self._first_noise_scale: float | None = None
        """The first measured noise scale: the rates were chosen for the base batch at that noise."""
        self.undo: list[tuple[dict[str, Any], str, Any, Any]] = []
        """(group, name, own value, temporary value) for each setting changed for the current step."""
        self._ratio = first_batch_size / self.base_batch_size
        self.gains = GainSum(1.0)
        self.factor = self.factor_at(first_batch_size)
        """The current factor of the schedule's own rates: the batch size's times those of decisions."""
        self._decided_factor = 1.0
        self._own: Any = None
        """The object that held the first group's own rate at the last look, and the rate then."""
        self._own_version, self._own_value = 0, 0.0
        self._highest_own = [0.0] * len(optimizer.param_groups)
        """The highest own rate of each group so far."""
        self.look()

    @property
    def lr(self) -> float:
        """The first group's rate in the next step."""
        return self.own * self.factor

    @property
    def own(self) -> float:
        """The schedule's own rate of the first group."""
        return float(self.undo[0][2] if self.factor != 1 and self.undo else self.optimizer.param_groups[0]["lr"])

    def schedule_ratio(self) -> float:
        """Return the schedule's own rate over its highest so far, in the group where the rate has fallen least.

        NaN if all rates have been zero so far.
        """
        if self.undo:
            self.put_back()
        self.look()
        own = (float(group["lr"]) for group in self.optimizer.param_groups)
        return max((rate / high for rate, high in zip(own, self._highest_own, strict=False) if high), default=math.nan)

    def look(self) -> bool:
        """Record the own rates; return whether the first group's rate has changed since the last call."""
        groups, highest = self.optimizer.param_groups, self._highest_own
        for place in range(1, len(groups)):
            if place == len(highest):  # a group that was added later
                highest.append(0.0)
            lr = groups[place]["lr"]
            # Reading a tensor waits for its device: a schedule in tensors is known from its first group.
            if not isinstance(lr, Tensor) and lr > highest[place]:
                highest[place] = lr
        lr = groups[0]["lr"]
        # Reading a tensor waits for its device, so only one that was written to is read.
        if lr is self._own and (not isinstance(lr, Tensor) or lr._version == self._own_version):
            return False
        before, self._own_value = self._own_value, float(lr)
        self._own, self._own_version = lr, getattr(lr, "_version", 0)
        highest[0] = max(highest[0], self._own_value)
        return before != self._own_value

    # A step

    def put_in_force(self) -> None:
        """Change the groups' settings for the step that begins."""
        if self.undo:  # the last step raised
            self.put_back()
        factor, ratio = self.factor, self._ratio
        if factor != 1:
            for group in self.optimizer.param_groups:
                own = group["lr"]
                if isinstance(own, Tensor):
                    own, put = _put(own, mul, factor)
                else:
                    put = group["lr"] = own * factor
                self.undo.append((group, "lr", own, put))
        if ratio != 1 and self.kind in ADAM_RULES:
            for group in self.optimizer.param_groups:
                for name, rule in _rules_of(self.kind, group):
                    own, group[name] = _put(group[name], rule, ratio)
                    self.undo.append((group, name, own, group[name]))

    def put_back(self) -> None:
        """Restore the own values, except where the step itself wrote a value."""
        for group, name, own, put in self.undo:
            if group[name] is put:
                group[name] = _own_again(own, put)
        self.undo.clear()
        if isinstance(self._own, Tensor):
            self._own_version = self._own._version

    # A change of the batch size

    def follow(
        self, batch_size: int, *, lr_factor: float = 1.0, noise_scale: float | None = None, step: int = 0
    ) -> None:
        """Adjust the rates to `batch_size`; `lr_factor` stays in effect from now on.

        `noise_scale` is the latest measurement in samples, if there is any; `step` counts the steps so far.
        """
        if not 0 < lr_factor < math.inf:
            raise ArgumentError(f"lr_factor must be positive and finite, got lr_factor={lr_factor!r}")
        # An infinite estimate found no signal, and 1 / (1 + B / b) would end training on it.
        if noise_scale is not None and (noise_scale < math.inf or self.kind in BY_GAIN):
            self._noise_scale = max(0.0, noise_scale)
            if self._first_noise_scale is None:
                self._first_noise_scale = self._noise_scale
        ratio = batch_size / self.base_batch_size
        if self.kind == "adam" and ratio != self._ratio:
            _count_steps_in(self.optimizer, ratio / self._ratio)
        self._ratio = ratio
        if self.kind in BY_GAIN:
            self.gains.change(gain(ratio, self._noise), step)
        self._decided_factor *= lr_factor
        self.factor = self.factor_at(batch_size) * self._decided_factor

    @property
    def _noise(self) -> float | None:
        """The noise scale over the base batch size."""
        return None if self._noise_scale is None else self._noise_scale / self.base_batch_size

    def factor_at(self, batch_size: int) -> float:
        """Return the factor of `batch_size` alone, without the factors of decisions."""
        ratio = batch_size / self.base_batch_size
        factor = factor_of(self.kind, ratio, self._noise)
        if self.kind == "1/(1+B/b)" and self._first_noise_scale is not None:
            # Relative to the base batch at the noise first measured.
            factor /= factor_of(self.kind, 1.0, self._first_noise_scale / self.base_batch_size)
        return factor / ratio if self.is_of_sum else factor

    def state_dict(self) -> dict[str, Any]:
        """Return the factors and what they depend on. The own values are in the optimizer's state."""
        saved = {name.lstrip("_"): copy.copy(getattr(self, name)) for name in _COUPLING_STATE}
        return {**saved, "gains": asdict(self.gains)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Optimizer and scheduler may be loaded before or after."""
        self.put_back()
        for name in _COUPLING_STATE:
            setattr(self, name, copy.copy(state[name.lstrip("_")]))
        self.gains = GainSum(**state["gains"])


_COUPLING_STATE = (
    *("base_batch_size", "_ratio", "factor", "_decided_factor", "_highest_own", "_noise_scale", "_first_noise_scale"),
)


def _put(held: Any, rule: Rule | tuple[Rule, Rule], k: float) -> tuple[Any, Any]:
    """Return a setting's own value, and the changed value for its group.

    Tensors are written in place, since captured and compiled steps read them; their own value is a copy.
    """
    if isinstance(rule, tuple):  # two betas
        both = [_put(each, one, k) for each, one in zip(held, rule, strict=True)]
        return type(held)(own for own, _ in both), type(held)(put for _, put in both)
    if isinstance(held, Tensor):
        own = held.clone()
        return own, held.copy_(rule(own, k))
    return held, rule(held, k)


def _own_again(own: Any, put: Any) -> Any:
    """Return the own value, in the tensors that held it."""
    if isinstance(put, Tensor):
        return put.copy_(own)
    if isinstance(put, tuple | list):
        return type(put)(_own_again(mine, there) for mine, there in zip(own, put, strict=True))
    return own


# Schedulers

Unit = Literal["epoch", "step", "call"]
SURE = 3
"""The number of steps that must agree before an error says that the loop contradicts its arguments."""


def position_of(scheduler: Any) -> int:
    """Return the number of steps that a scheduler has counted; -1: it counts none."""
    while not isinstance(position := getattr(scheduler, "last_epoch", None), int):
        parts = getattr(scheduler, "_schedulers", ())  # ChainedScheduler leaves the count to its parts
        if not parts:
            return -1
        scheduler = parts[0]
    return position


class Schedule:
    """A scheduler of the user's: checked against its unit, and advanced by samples if it counts steps.

    With the unit "step" the scheduler is left alone while the batch size is the first one. After the first change the
    scheduler is stepped to where a loop at the first size would be after as many samples. If batches are smaller than
    the first ones, a step that the loop makes too early is taken back.

    `first_size` is the loader's first batch size, and `accumulate` the number of its batches in an optimizer step.
    """

    def __init__(
        self,
        scheduler: Any,
        unit: Unit,
        loader: AdaptiveLoader,
        optimizer: Optimizer,
        *,
        first_size: int,
        accumulate: int,
    ) -> None:
        self.scheduler, self.unit, self._loader = scheduler, unit, loader
        self.name, self.optimizer = type(scheduler).__name__, optimizer
        self._first_delivery = loader.delivery_size or first_size
        """Samples of a delivered batch at the first size."""
        self._gap = math.ceil(first_size / self._first_delivery) if loader.delivery_size else accumulate
        """Batches of a step at the first size."""
        self.rest = "own step" if loader.delivery_size else "left out"
        """The treatment of an epoch's last batches that fill no step."""
        self._first_epoch = loader.epoch
        self._lead: int | None = None
        """The scheduler's steps so far minus those due by samples, fixed when the size first changes."""
        self._at_begin = position_of(scheduler)
        """The scheduler's position at the first step of the epoch."""
        self._at_end: int | None = None
        """The scheduler's position at the epoch's decision; None: not known, or a warning was given."""
        self._is_sure = unit == "call"
        self._kept: tuple[int, Any, list[dict[str, Any]]] | None = None
        """The scheduler's position before its last step, its state there, and the groups."""

    def before_step(self, number: int, before: int, after: int) -> None:
        """Check and catch up before step `number` of the epoch; the arguments are those of `Rates.before_step`."""
        if number == 0:
            self._at_begin, self._kept = position_of(self.scheduler), None
            if self.unit == "epoch" and self._at_end is not None and self._at_begin > self._at_end:
                self._at_end = None
                warn_user(
                    f"{self.name}.step() is called after control.step(), whose record said another learning rate than "
                    f"the one in use now: call control.step() last, after scheduler.step()"
                )
        elif not self._is_sure and self.unit == "epoch" and position_of(self.scheduler) > self._at_begin + 1:
            raise self._wrong_unit()
        self.catch_up(before, after)

    def catch_up(self, samples: int | None, after: int | None = None) -> None:
        """Make the steps that are due after `samples` of the epoch; None: between epochs."""
        if self._lead is None or self.unit != "step":
            return
        place = self._place(samples) + self._lead
        for position in range(position_of(self.scheduler), place):
            if after is not None and position == place - 1 and self._place(after) + self._lead <= place:
                self._keep(position)  # the loop's next step will be one too many
            self.scheduler.step()

    def _wrong_unit(self) -> UsageError:
        return UsageError(
            f"{self.name}.step() is called within the epoch, and scheduler_unit is 'epoch': pass Controller(..., "
            f"scheduler_unit='step') if it counts steps of the first batch size, scheduler_unit='call' if each call is "
            f"one step of it whatever the batch size"
        )

    def after_step(self, samples: int, batch_size: int) -> None:
        """Take back the loop's coming step in advance if the samples of the epoch say that no step is due.

        To make that possible, the state is kept if the next step, of `batch_size` samples, may not be due.
        """
        if self._lead is None or self.unit != "step":
            return
        position, place = position_of(self.scheduler), self._place(samples) + self._lead
        if place > position:
            size = self._loader.dataset_size
            following = samples + batch_size if size is None else min(samples + batch_size, size)
            if self._place(following) + self._lead <= max(place, position + 1):
                self._keep(position)
        elif self._kept is None or self._kept[0] != position - 1:
            self._keep(position)
        elif self.optimizer.param_groups[0]["lr"] == self.scheduler.get_last_lr()[0]:
            # A rate that other code has written since is kept.
            self.scheduler.load_state_dict(copy.deepcopy(self._kept[1]))
            for group, kept in zip(self.optimizer.param_groups, self._kept[2], strict=True):
                group.update({name: _own_again(_own_of(value), group[name]) for name, value in kept.items()})

    def _keep(self, position: int) -> None:
        groups = self.optimizer.param_groups
        own = [{name: _own_of(value) for name, value in group.items() if name != "params"} for group in groups]
        self._kept = position, copy.deepcopy(self.scheduler.state_dict()), own

    def resize(self) -> None:
        """Count samples from here on: the batch size is about to differ from the first."""
        if self._lead is None and self.unit == "step":
            current = self._loader.current
            self._lead = position_of(self.scheduler) - self._place(None if current is None else current.samples)

    def end_epoch(self, steps: int, batches: int, is_first_size: bool) -> None:
        """Check the scheduler's calls in an epoch, and make the steps that remain.

        Args:
            steps: The epoch's optimizer steps.
            batches: The epoch's batches.
            is_first_size: Whether all of them had the first size.
        """
        moved = position_of(self.scheduler) - self._at_begin
        if self.unit == "epoch" and moved > 1 and steps > 1 and not self._is_sure:
            raise self._wrong_unit()
        counts_steps = self.unit == "step" and self._lead is None and not self._is_sure and steps >= SURE
        if counts_steps and not 1 < moved <= steps + 1:
            seen = f"{moved} times" if moved > 1 else "once" if moved else "not once"
            way = (
                "call it once after each optimizer step, or pass scheduler_unit='call'"
                if moved > 1
                else "pass scheduler_unit='epoch' (the default) for a scheduler stepped after each epoch"
            )
            raise UsageError(
                f"{self.name}.step() was called {seen} in an epoch of {steps} optimizer steps, and scheduler_unit is "
                f"'step': {way}"
            )
        self._is_sure = self._is_sure or steps >= SURE
        if is_first_size and self.rest == "left out" and batches % self._gap and steps > batches // self._gap:
            self.rest = "own step"
        self.catch_up(None)
        self._at_end = position_of(self.scheduler)

    def _place(self, samples: int | None) -> int:
        """Return the steps of a loop at the first size after `samples` of this epoch. None: before it begins."""
        size, epochs = self._loader.dataset_size, self._loader.epoch - self._first_epoch
        batches = 0 if size is None else num_batches(size, self._first_delivery, drop_last=self._loader.drop_last)
        before, after = (self._whole_epochs(batches, each) for each in (epochs, epochs + 1))
        if samples is None:
            return before
        done = math.ceil(samples / self._first_delivery)
        if self.rest == "carried over":
            done += epochs * batches % self._gap
        place = before + math.ceil(done / self._gap)
        return place if size is None else min(place, after)

    def _whole_epochs(self, batches: int, epochs: int) -> int:
        if self.rest == "carried over":
            return epochs * batches // self._gap
        return epochs * (math.ceil(batches / self._gap) if self.rest == "own step" else batches // self._gap)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's position relative to its samples."""
        return {name.lstrip("_"): getattr(self, name) for name in _SCHEDULE_STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. The scheduler may be loaded before or after."""
        for name in _SCHEDULE_STATE:
            setattr(self, name, state[name.lstrip("_")])
        self._kept = self._at_end = None


_SCHEDULE_STATE = ("_first_delivery", "_gap", "_first_epoch", "rest", "_lead", "_at_begin", "_is_sure")


def _own_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def schedules_of(
    schedulers: Sequence[Any],
    unit: Unit | Sequence[Unit],
    optimizers: Sequence[Optimizer],
    loader: AdaptiveLoader,
    *,
    first_size: int,
    accumulate: int,
) -> list[Schedule]:
    """Return the schedulers with their units; raise for any that does not drive these optimizers."""
    units: list[Any] = [unit] * len(schedulers) if isinstance(unit, str) else list(unit)
    for each in [unit] if isinstance(unit, str) else units:
        require_choice("scheduler_unit", each, ("epoch", "step", "call"))
    if len(units) != len(schedulers):
        raise ArgumentError(
            f"scheduler_unit must be one word, or one for each of the {len(schedulers)} schedulers, got {units}"
        )
    inner = {id(part) for each in schedulers for part in getattr(each, "_schedulers", ())}
    found = []
    for scheduler, its_unit in zip(schedulers, units, strict=True):
        name, driven = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
        if not callable(getattr(scheduler, "step", None)):
            raise ArgumentError(f"scheduler must be an object with a method step(), or a list of such, got {name}")
        is_one_of_them = any(driven is optimizer for optimizer in optimizers)
        if not is_one_of_them and (driven is not None or isinstance(scheduler, LRScheduler)):
            raise ArgumentError(f"scheduler {name} does not drive the optimizer that was passed")
        if its_unit == "step" and (isinstance(scheduler, ReduceLROnPlateau) or position_of(scheduler) < 0):
            raise ArgumentError(
                f"{name} cannot be stepped by samples: call it after each epoch (scheduler_unit='epoch'), or leave "
                f"it as it is with scheduler_unit='call'"
            )
        if id(scheduler) not in inner:  # a scheduler inside another one is stepped by the outer one
            driven = optimizers[0] if driven is None else driven
            found.append(Schedule(scheduler, its_unit, loader, driven, first_size=first_size, accumulate=accumulate))
    return found


# All optimizers

BEFORE, FEWEST = 16, 4
"""The most and the fewest steps before a change of the batch size that the first step after it is compared with."""
CLOSELY, EVERY = 64, 8
"""First steps with a size, at which every gradient is looked at, and the steps between later looks: they cost time."""
ENOUGH_GROWTH = 4
"""The growth of the batch from which a sum differs clearly from a mean."""
SUM_FROM, SUM_TO = 0.25, 3
"""Powers of the batch size between which the mean square is taken for that of a sum: training adds something to it, and
much more if it diverges."""
ENOUGH_ENTRIES = 64
"""The entries of a parameter whose gradient shows enough."""


class GradientGrowth:
    """The growth of one small parameter's gradient with the batch, whatever the policy measures.

    The mean square follows a power of the batch size: from -1 (noise) to 0 (signal) for a mean, from 1 to 2 for a sum.
    Each change of the batch size shows it at the first step after it, before another rate has done anything. So neither
    the course of training counts nor a rate that is too high.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameter: Tensor | None = None
        self._norms: deque[Tensor] = deque(maxlen=BEFORE)
        """Norms of its gradients at the last steps with the current size."""
        self._ratio, self._steps = 1.0, 0
        """The change of the batch size since then, and the steps with the current size."""
        self.batch = self.gradient = 1.0
        """The growth of the batch and of the mean square so far, over all changes that could be compared."""

    def see(self) -> None:
        """Look at the gradient of the step that begins: at all of the first steps with a size, then at one in EVERY."""
        self._steps += 1
        if self._ratio == 1 and self._steps > CLOSELY and self._steps % EVERY:
            return
        if self._parameter is None or self._parameter.grad is None:
            groups = self.optimizer.param_groups
            there = [p for group in groups for p in group["params"] if p.grad is not None and not is_sharded(p)]
            if not there:
                return
            large = [p for p in there if p.numel() >= ENOUGH_ENTRIES]
            self._parameter = min(large, key=Tensor.numel) if large else max(there, key=Tensor.numel)
        assert self._parameter.grad is not None
        norm = self._parameter.grad.detach().norm()
        if self._ratio != 1:
            self._compare(norm)
        self._norms.append(norm)

    def change(self, ratio: float) -> None:
        """Take note of a batch of `ratio` times the samples from the next step on."""
        self._ratio *= ratio

    def _compare(self, norm: Tensor) -> None:
        if len(self._norms) >= FEWEST:
            before = float(torch.stack(list(self._norms)).float().square().mean())
            if 0 < before < math.inf and 0 < (after := float(norm) ** 2) < math.inf:
                self.batch, self.gradient = self.batch * self._ratio, self.gradient * after / before
        self._norms.clear()
        self._ratio, self._steps = 1.0, 1


class Rates:
    """The learning rates of all optimizers; each follows the batch size by its own coupling of `kinds`.

    Batch sizes here are those of optimizer steps. The other arguments are the controller's.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        kinds: Sequence[Coupling],
        loader: AdaptiveLoader,
        first_batch_size: int,
        schedulers: Sequence[Any] = (),
        scheduler_unit: Unit | Sequence[Unit] = "epoch",
        base_batch_size: int | None = None,
        accumulate: int = 1,
        loss_reduction: str = "mean",
    ) -> None:
        self.schedules = schedules_of(
            schedulers,
            scheduler_unit,
            optimizers,
            loader,
            first_size=first_batch_size // (1 if loader.delivery_size else accumulate),
            accumulate=accumulate,
        )
        self.couplings = {
            optimizer: LrCoupling(
                optimizer,
                kind=kind,
                first_batch_size=first_batch_size,
                base_batch_size=base_batch_size,
                loss_reduction=loss_reduction,
            )
            for optimizer, kind in zip(optimizers, kinds, strict=True)
        }
        self.first = self.couplings[optimizers[0]]
        """The coupling of the optimizer whose rate policies and records see."""
        self.first_batch_size = self.batch_size = first_batch_size
        self._is_left_alone = scheduler_unit == "call" or any(each.unit != "epoch" for each in self.schedules)
        self._moves, self._has_warned = 0, False
        self.epoch_lr, self._is_used = self.first.lr, False
        """The rate of the first step since `mark`; before that step, the rate expected for it."""
        self._needs_noise = not BY_NOISE.isdisjoint(kinds)
        growing = [o for o, each in self.couplings.items() if each.kind != "none" and not isinstance(o, _ADAM_LIKE)]
        self.may_be_sum = GradientGrowth(growing[0]) if growing and loss_reduction == "mean" else None
        """The evidence for a summed loss; None: the reduction was passed, makes no difference, or is known by now."""

    @property
    def gains(self) -> GainSum:
        """The sum of AdaScale's gains for the first optimizer that has one."""
        return next((each for each in self.couplings.values() if each.kind in BY_GAIN), self.first).gains

    def mark(self) -> None:
        """Note that a new rate begins: at an epoch's start, or after a change of the batch size."""
        self.epoch_lr, self._is_used = self.first.lr, False

    def schedule_ratio(self) -> float:
        """Return the own rate over its highest so far, of the group and optimizer where the rate has fallen least."""
        ratios = [each.schedule_ratio() for each in self.couplings.values()]
        return max((each for each in ratios if not math.isnan(each)), default=math.nan)

    @property
    def growth(self) -> float:
        """The first optimizer's rate in a step over the schedule's own, relative to the first batch, for a mean."""
        grown = self.first.factor / self.first.factor_at(self.first_batch_size)
        return grown * self.batch_size / self.first_batch_size if self.first.is_of_sum else grown

    def before_step(self, coupling: LrCoupling, number: int, before: int, after: int) -> None:
        """Set schedulers and rates for the step that begins.

        Args:
            coupling: The coupling of the optimizer that steps.
            number: The number of the epoch's earlier steps; -1: no epoch has begun.
            before: Samples of the epoch delivered by the last step.
            after: Samples of the epoch delivered now.
        """
        if number >= 0:
            for schedule in self.schedules:
                if schedule.optimizer is coupling.optimizer:
                    schedule.before_step(number, before, after)
        has_moved = coupling.look()
        coupling.put_in_force()
        if coupling is self.first:
            self._moves = self._moves + 1 if has_moved and number > 0 else 0
            if self._moves >= SURE and not self._is_left_alone and self.batch_size > self.first_batch_size:
                self._warn_of_a_course_by_steps()
            if not self._is_used:
                self.epoch_lr, self._is_used = float(coupling.optimizer.param_groups[0]["lr"]), True

    def after_step(self, coupling: LrCoupling, samples: int) -> None:
        """Restore the own rates after a step; `samples` of the epoch have been delivered."""
        if coupling.undo:
            coupling.put_back()
        for schedule in self.schedules:
            if schedule.optimizer is coupling.optimizer:
                schedule.after_step(samples, self.batch_size)

    def _warn_of_a_course_by_steps(self) -> None:
        last: list[Any] = [getattr(each.scheduler, "get_last_lr", list)() for each in self.schedules]
        if self._has_warned or any(rates and float(rates[0]) == self.first.own for rates in last):
            return  # a scheduler that was passed does so, given fractions of an epoch
        self._has_warned = True
        warn_user(
            f"the learning rate changes within the epoch, and batches have grown from {self.first_batch_size} to "
            f"{self.batch_size} samples: a schedule that counts steps will not reach its end. Pass a scheduler stepped "
            f"with every batch: Controller(..., scheduler=scheduler, scheduler_unit='step'). If your loop writes the "
            f"rate, count loader.samples_delivered // {self.first_batch_size}; or pass scheduler_unit='call'"
        )

    # Following

    def follow(
        self, batch_size: int, *, lr_factor: float = 1.0, noise_scale: float | None = None, step: int = 0
    ) -> None:
        """Set all rates for `batch_size`; `lr_factor` stays in effect from now on.

        `noise_scale` is the latest measurement in samples, if there is any; `step` counts the steps so far.
        """
        if batch_size != self.batch_size:
            for schedule in self.schedules:
                schedule.resize()
            if self.may_be_sum is not None:
                self.may_be_sum.change(batch_size / self.batch_size)
        for coupling in self.couplings.values():
            if coupling.undo:
                coupling.put_back()
            coupling.follow(batch_size, lr_factor=lr_factor, noise_scale=noise_scale, step=step)
        self.batch_size = batch_size

    def follow_decision(self, decision: Decision, seen: Measurement) -> None:
        """Set all rates for the decision; some couplings also use the measured noise."""
        noise_scale = seen.diversity.noise_scale if self._needs_noise and seen.diversity is not None else math.nan
        known = None if math.isnan(noise_scale) else noise_scale
        self.follow(decision.batch_size, lr_factor=decision.lr_factor, noise_scale=known, step=seen.step)

    def look_at_gradients(self, optimizer: Optimizer) -> None:
        """Warn, once, if the gradients of a step have grown about as much as the batch, as those of a sum do."""
        growth = self.may_be_sum
        if growth is None or growth.optimizer is not optimizer:
            return
        growth.see()
        if growth.batch < ENOUGH_GROWTH:
            return
        is_sum = SUM_FROM < math.log(growth.gradient) / math.log(growth.batch) < SUM_TO
        if is_sum or growth.batch >= ENOUGH_GROWTH**2:
            self.may_be_sum = None
        if is_sum:
            warn_user(
                f"the gradients have grown by about as much as the batch, {self.first_batch_size} -> {self.batch_size} "
                f"samples, and the learning rate follows the batch as for a mean: is the loss a sum over the batch? "
                f"Then pass loss_reduction='sum', or take its mean"
            )

    def take_scheduler_steps(self, step: int) -> int:
        """Return the number of steps that the gains make due after `step`; the caller steps the schedulers."""
        self._is_left_alone = True
        for schedule in self.schedules:
            schedule.unit = "call"
        return self.gains.due(step)

    def catch_up(self, samples: int) -> None:
        """Make the steps that schedulers lack after `samples` of the epoch."""
        for schedule in self.schedules:
            schedule.catch_up(samples)

    def carry_over(self) -> None:
        """Count batches that filled no step towards the next epoch's first step, as the loop does."""
        for schedule in self.schedules:
            schedule.rest = "carried over"

    def end_epoch(self, steps: int, batches: int, *, is_first_size: bool) -> None:
        """Check schedulers, and advance them to the epoch's end."""
        for schedule in self.schedules:
            schedule.end_epoch(steps, batches, is_first_size)

    # State

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the saved one."""
        return {
            "lr_coupling": [each.kind for each in self.couplings.values()],
            "parameter_groups": [len(optimizer.param_groups) for optimizer in self.couplings],
            "schedulers": [each.name for each in self.schedules],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the factors, and the schedulers' positions relative to the samples."""
        return {
            "couplings": [coupling.state_dict() for coupling in self.couplings.values()],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "batch_sizes": [self.first_batch_size, self.batch_size],
            "epoch_lr": [self.epoch_lr, self._is_used],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Optimizers and schedulers may be loaded before or after."""
        for coupling, saved in zip(self.couplings.values(), state["couplings"], strict=True):
            coupling.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self.first_batch_size, self.batch_size = state["batch_sizes"]
        self.epoch_lr, self._is_used = state["epoch_lr"]
