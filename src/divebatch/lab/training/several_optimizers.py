"""Several optimizers that train one model together, as one."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


def together(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer that steps all of them; the only one where there is one."""
    return optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that `together` was given."""
    return list(optimizer.parts) if isinstance(optimizer, SeveralOptimizers) else [optimizer]


class SeveralOptimizers(Optimizer):
    """Steps its parts one after the other. The parameter groups are the very ones of the parts.

    Hooks before its step, such as one that clips, come before those of the parts: they must all see equal gradients.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self._take_groups()

    def _take_groups(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SeveralOptimizers":
        # torch copies parameter groups and state alone.
        return SeveralOptimizers(copy.deepcopy(self.parts, memo))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each part."""
        if closure is not None:
            raise NotImplementedError("several optimizers cannot share a closure: each would call it again")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' states as that of one optimizer, parameters numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        shift = 0
        for part in self.parts:
            own = part.state_dict()
            state.update({shift + number: value for number, value in own["state"].items()})
            groups += _renumbered(own["param_groups"], shift)
            shift += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each part its share."""
        shift, groups = 0, list(state_dict["param_groups"])
        for part in self.parts:
            own = [groups.pop(0) for _ in part.param_groups]
            size = sum(len(group["params"]) for group in own)
            numbers = range(shift, shift + size)
            state = {number - shift: state_dict["state"][number] for number in numbers if number in state_dict["state"]}
            part.load_state_dict({"state": state, "param_groups": _renumbered(own, -shift)})
            shift += size
        self._take_groups()


def _renumbered(groups: list[dict[str, Any]], shift: int) -> list[dict[str, Any]]:
    return [{**group, "params": [number + shift for number in group["params"]]} for group in groups]
