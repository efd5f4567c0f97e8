"""Adam's other settings: how betas, eps and weight decay follow the batch size, for `lr_coupling="adam"`.

Malladi et al. 2022 (Adam's stochastic differential equation), Marek et al. 2025 (half-lives in samples) and Bergsma et
al. 2025 (weight decay).
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import ASGD, SGD, Adam, Adamax, AdamW, NAdam, Optimizer

from divebatch.errors import ArgumentError

Mark = tuple[Any, int]
"""The very object that holds a value, and how often it was written to in place."""
Rule = Callable[[float, float], float]
"""(own value, k) -> the value at k times the base batch size. That of k1 and then k2 is that of k1 * k2."""

ADAM_RULES: Mapping[str, Rule] = {
    "betas": lambda beta, k: float(beta**k),  # as much of a mean is forgotten after as many samples
    "eps": lambda eps, k: eps / math.sqrt(k),  # beside the root of the second moment, which noise makes smaller so
    "weight_decay": lambda decay, k: decay * math.sqrt(k),  # lr * weight_decay / batch_size stays
    "momentum_decay": lambda decay, k: decay * k,  # NAdam's, per step
}
"""How each setting of a parameter group follows, where the group has it."""
KNOWN = (Adam, AdamW, Adamax, NAdam)
"""Not RAdam, which stops dividing by the second moment where beta2 is small; not SparseAdam, where a row's moments
decay only when it is used."""


def require_adam(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose settings the rules were not made for."""
    if isinstance(optimizer, KNOWN):
        return
    known = ", ".join(kind.__name__ for kind in KNOWN)
    other = "linear" if isinstance(optimizer, SGD | ASGD) else "sqrt"
    raise ArgumentError(
        f"lr_coupling='adam' sets betas, eps and weight decay as well, for torch's {known}, and "
        f"{type(optimizer).__name__} is none of them: pass lr_coupling={other!r}, which moves the learning rate alone. "
        f"Several optimizers may each have their own, as a list in their order"
    )


class GroupSettings:
    """Keeps settings of one optimizer's parameter groups where the batch size wants them.

    Each is computed from the user's own value, never from the one before, so that going back gives the same number. A
    setting that the loop or a scheduler writes is noticed before the optimizer's next step, and is its own value from
    then on.

    Args:
        optimizer: The optimizer.
        rules: How each setting follows, by its name in the groups; none for a coupling that moves the rate alone.
        ratio: The batch size over the one that the own values were chosen for.
    """

    def __init__(self, optimizer: Optimizer, rules: Mapping[str, Rule], *, ratio: float) -> None:
        self._optimizer, self._rules, self._ratio = optimizer, rules, ratio
        self._own: list[dict[str, list[float]]] = []
        """The own values of each group: two betas, one of everything else."""
        self._put: list[dict[str, list[Mark]]] = []
        """What was put into the groups, to know it from what others put there."""
        self._replaced: dict[tuple[int, str, int], tuple[Any, float]] = {}
        """The value that was in force before the loop's last write, and the own one under it."""
        self.take_in()

    def follow(self, ratio: float) -> None:
        """Put all settings where `ratio` times the base batch size wants them."""
        self.take_in()
        if self._rules and ratio != self._ratio:
            count_steps_in(self._optimizer, ratio / self._ratio)
        self._ratio = ratio
        self._write(ratio)

    def show_own(self) -> None:
        """Put the own values into the groups, for a scheduler."""
        self.take_in()
        self._write(1.0)

    def show_in_force(self) -> None:
        """Take in what a scheduler has written, and put the values in force back."""
        self._notice()
        self._write(self._ratio)

    def take_in(self) -> None:
        """Make what others wrote the own values, and put those in force in their place."""
        if self._notice():
            self._write(self._ratio)

    def _notice(self) -> bool:
        """Whether somebody wrote a setting, or added a group."""
        found = False
        for index, group in enumerate(self._optimizer.param_groups):
            if index == len(self._own):
                self._own.append({name: list(map(float, _values(group[name]))) for name in self._names(group)})
                found = found or bool(self._own[index])
                continue
            for name, own in self._own[index].items():
                for place, value in enumerate(_values(group[name])):
                    if not _is_ours(value, self._put[index][name][place]):
                        own[place] = self._own_of((index, name, place), value)
                        found = True
        return found

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        # An L2 penalty is a part of the loss, which the batch size must not change.
        has_penalty = not group.get("decoupled_weight_decay")
        return [name for name in self._rules if name in group and not (name == "weight_decay" and has_penalty)]

    def _own_of(self, place: tuple[int, str, int], written: Any) -> float:
        value, own = self._replaced.get(place, (None, 0.0))
        # A loop that set it aside puts the very same object back. Tensors are written to in place.
        if written is value and not isinstance(value, Tensor):
            return own
        index, name, of_pair = place
        self._replaced[place] = self._put[index][name][of_pair][0], self._own[index][name][of_pair]
        return float(written)

    def _write(self, ratio: float) -> None:
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            for name, values in own.items():
                new = [self._rules[name](value, ratio) for value in values]
                held = tuple(map(_written, _values(group[name]), new))
                group[name] = held if isinstance(group[name], tuple | list) else held[0]
        self._mark_all()

    def _mark_all(self) -> None:
        groups = zip(self._optimizer.param_groups, self._own, strict=True)
        self._put = [{name: list(map(_mark, _values(group[name]))) for name in own} for group, own in groups]

    def was_loaded(self) -> None:
        """The optimizer has loaded a state: its settings are those that were in force when it was saved."""
        if len(self._own) != len(self._optimizer.param_groups):
            return
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            for name, values in own.items():
                own[name] = [
                    self._own_under(self._rules[name], float(found), value)
                    for found, value in zip(_values(group[name]), values, strict=True)
                ]
        self._mark_all()

    def _own_under(self, rule: Rule, found: float, own: float) -> float:
        is_its = math.isclose(found, rule(own, self._ratio), rel_tol=1e-6)  # tensors may hold it in single precision
        return own if is_its else rule(found, 1 / self._ratio)

    def state_dict(self) -> dict[str, Any]:
        """The own values and the ratio, from which those in force follow."""
        return {"own": copy.deepcopy(self._own), "ratio": self._ratio}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        self._own, self._ratio = copy.deepcopy(state["own"]), state["ratio"]
        self._write(self._ratio)


def scale_settings(optimizer: Optimizer, ratio: float) -> None:
    """Put the settings of an optimizer without a coupling where `ratio` times its batch size wants them, once.

    Args:
        optimizer: One that `require_adam` knows.
        ratio: The new batch size over the one that its present settings belong to.
    """
    require_adam(optimizer)
    GroupSettings(optimizer, ADAM_RULES, ratio=1.0).follow(ratio)


def count_steps_in(optimizer: Optimizer, ratio: float) -> None:
    """Count the steps so far in steps of `ratio` times the samples.

    Adam divides its means by 1 - beta^step, the sum of their weights, with the beta of today. Where that was another
    for the steps so far, (beta^ratio)^(step / ratio) is what they really left.
    """
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor):
            step.div_(ratio)


def _values(setting: Any) -> Sequence[Any]:
    """Both betas, or the one number."""
    return setting if isinstance(setting, tuple | list) else (setting,)


def _written(held: Any, value: float) -> Any:
    """What a group must hold for `value`: a tensor is filled in place, since captured and compiled steps read it."""
    return held.fill_(value) if isinstance(held, Tensor) else value


def _mark(value: Any) -> Mark:
    return value, value._version if isinstance(value, Tensor) else 0


def _is_ours(value: Any, put: Mark) -> bool:
    return value is put[0] and _mark(value)[1] == put[1]
