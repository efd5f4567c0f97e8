"""What the saved states of torch's own objects must hold. Torch loads most odd values, and fails steps later or never.

A model shows by itself what its state holds, and so does a scheduler but for how far it has come. Of an optimizer that
has made no step only the settings are known, not yet what it will keep of each parameter.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.errors import CheckpointError
from divebatch.lab.training.several_optimizers import parts_of
from divebatch.norms.accumulators import tensor_like, tensors_like
from divebatch.state_checks import (
    Check,
    anything,
    list_of,
    number,
    optional,
    row_of,
    same,
    table,
    table_of,
    text,
    truth,
    whole,
    wrong,
)

BY_DEVICE = {"fused", "foreach"}
"""Settings of optimizers that a run on another device may have otherwise."""
MOVING: dict[Any, Check] = {
    **dict.fromkeys(("last_epoch", "_step_count"), whole()),
    **dict.fromkeys(("_get_lr_called_within_step", "_is_initial"), truth),
    "_last_lr": list_of(number(at_least=0)),
}
"""What a scheduler changes on its way; the rest are its settings."""


def model_state(model: nn.Module) -> Check:
    """Accept the parameters and buffers of such a model."""
    return tensors_like(model.state_dict())


def scheduler_state(scheduler: LRScheduler) -> Check:
    """Accept the state of a scheduler with the same settings."""
    return _as_in(scheduler.state_dict())


def optimizer_state(optimizer: Optimizer) -> Check:
    """Accept settings of the form that this optimizer's have, and a memory of all its parameters or none.

    Of several optimizers each has its own.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    settings = row_of(*map(_settings_of, groups), of="parameter groups")

    def check(place: str, state: Any) -> None:
        table({"param_groups": settings, "state": table_of(whole(at_most=len(parameters) - 1), anything)})(place, state)
        memory = {number: _memory_of(each) for number, each in enumerate(parameters)}
        for part in _numbers(optimizer):
            found = {number: state["state"][number] for number in part if number in state["state"]}
            if found:
                table({number: memory[number] for number in part})(f"{place}.state", found)
        for group in groups:
            if group["params"][0] in state["state"]:
                _require_alike(f"{place}.state", {number: state["state"][number] for number in group["params"]})

    return check


def _numbers(optimizer: Optimizer) -> Iterator[range]:
    """The numbers that the parameters of each of several optimizers have in their common state."""
    first = 0
    for part in parts_of(optimizer):
        size = sum(len(group["params"]) for group in part.param_groups)
        yield range(first, first + size)
        first += size


def _settings_of(group: Mapping[str, Any]) -> Check:
    """Numbers such as the rate may have changed on the way, the rest of the settings not."""
    numbers = number(at_least=0)

    def setting(name: str, value: Any) -> Check:
        if name in BY_DEVICE:
            return optional(truth)
        if isinstance(value, Tensor):
            return tensor_like(value)
        if isinstance(value, list | tuple):
            # Muon's coefficients may be negative.
            return row_of(*(same(each) if name == "params" or each < 0 else numbers for each in value))
        return same(value) if isinstance(value, bool | str) else optional(numbers) if value is None else numbers

    return table({name: setting(name, value) for name, value in group.items()})


def _memory_of(parameter: Tensor) -> Check:
    """What an optimizer keeps of a parameter: tensors of its shape, counts, and nothing."""

    def check(place: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.ndim:
            tensor_like(parameter)(place, value)
        else:
            optional(number(at_least=0))(place, value.item() if isinstance(value, Tensor) else value)

    return table_of(text, check)


def _require_alike(place: str, memories: Mapping[int, Mapping[str, Any]]) -> None:
    """All parameters of a group have the same kind of memory."""
    first, *others = memories
    for other in others:
        for key in sorted(memories[first].keys() ^ memories[other].keys()):
            there, missing = (first, other) if key in memories[first] else (other, first)
            raise CheckpointError(f"{place}.{there}.{key} is in the checkpoint, and {place}.{missing}.{key} is not")
        for key, mine in memories[first].items():
            if type(mine) is not type(memories[other][key]):
                kinds = f"a {type(mine).__name__} and a {type(memories[other][key]).__name__}"
                raise CheckpointError(f"{place}.{first}.{key} and {place}.{other}.{key} are {kinds} in the checkpoint")


def byte_tensor(place: str, value: Any) -> None:
    """Accept a tensor of bytes, as which torch gives the states of random generators."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        raise wrong(place, value, "a tensor of bytes")


def random_state(example: Tensor, device: torch.device) -> Check:
    """Accept the state of a random generator of that device, such as `example`."""

    def check(place: str, value: Any) -> None:
        byte_tensor(place, value)
        tensor_like(example)(place, value)
        try:
            torch.Generator(device).set_state(value.cpu())
        except RuntimeError as error:
            raise CheckpointError(f"{place} is no state of a random generator: {error}") from error

    return check


def _as_in(example: Any) -> Check:
    """Accept the same values, but for those of a scheduler that move."""
    if isinstance(example, Mapping):
        return table({key: MOVING.get(key) or _as_in(each) for key, each in example.items()})
    if isinstance(example, list | tuple):
        return row_of(*map(_as_in, example))
    return same(example) if isinstance(example, int | float | str | None) else anything
