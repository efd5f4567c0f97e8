"""What the saved states of torch's own objects must hold. Torch loads most odd values and fails steps later, or never.

A model shows by itself what its state holds. Of an optimizer that has made no step, and of a scheduler, only the form
is known: the keys, the lengths and the kinds of values.
"""

import math
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


def model_state(model: nn.Module) -> Check:
    """Accept the parameters and buffers of such a model."""
    return tensors_like(model.state_dict())


def scheduler_state(scheduler: LRScheduler) -> Check:
    """Accept what has the form of this scheduler's state."""
    return _like(scheduler.state_dict(), number(at_least=-math.inf, finite=False))


def optimizer_state(optimizer: Optimizer) -> Check:
    """Accept settings of the form that this optimizer's have, and a memory of all its parameters or none.

    Of several optimizers each has its own.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    settings = row_of(*(_like(group, number(at_least=0)) for group in groups), of="parameter groups")
    numbers = row_of(*(row_of(*map(same, group["params"])) for group in groups))

    def check(place: str, state: Any) -> None:
        table({"param_groups": settings, "state": table_of(whole(at_most=len(parameters) - 1), anything)})(place, state)
        numbers(f"{place}.param_groups", [group["params"] for group in state["param_groups"]])
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
                raise wrong(f"{place}.{other}.{key}", memories[other][key], f"a {type(mine).__name__}")


def random_state(example: Tensor) -> Check:
    """Accept the state of a random generator that gives such ones."""

    def check(place: str, value: Any) -> None:
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != example.shape:
            raise wrong(place, value, f"the state of a random generator, {example.numel()} bytes,")
        if example.device.type == "cpu":
            try:
                torch.Generator().set_state(value.cpu())
            except RuntimeError as error:
                raise CheckpointError(f"{place} is no state of a random generator: {error}") from error

    return check


def _like(example: Any, numbers: Check, *, is_rate: bool = False) -> Check:
    """Accept what has the form of `example`; `numbers` is asked of what is no count. A rate may be a whole number."""
    if isinstance(example, Mapping):
        return table({key: _like(each, numbers, is_rate="lr" in str(key)) for key, each in example.items()})
    if isinstance(example, list | tuple):
        return row_of(*(_like(each, numbers, is_rate=is_rate) for each in example))
    if isinstance(example, Tensor):
        return tensor_like(example)
    if isinstance(example, bool) or example is None:  # torch has None for a truth that it chooses by the device
        return optional(_truth_or(numbers) if example is None else truth)
    if isinstance(example, str):
        return text
    if isinstance(example, int) and not is_rate:
        return whole(at_least=-1)
    return numbers if isinstance(example, int | float) else anything


def _truth_or(numbers: Check) -> Check:
    return lambda place, value: None if isinstance(value, bool) else numbers(place, value)
