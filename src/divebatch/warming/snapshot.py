"""Everything that a training step changes, kept aside and put back.

Tensors are put back in place: compiled and recorded code, and the optimizer, know them by where they lie.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import load_signs_state, signs_state

PutBack = Callable[[], Any]
"""Gives an object back with the contents that it had."""


@contextmanager
def nothing_changed(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """After this, weights, gradients, buffers, optimizers and random states are as they were before."""
    put_back = [
        *_model_kept(model),
        *(each for optimizer in optimizers for each in _optimizer_kept(optimizer)),
        *map(_with_gradient, _parameters(model, optimizers)),
        *_random_kept(next((each.device for each in model.parameters()), torch.device("cpu"))),
    ]
    try:
        yield
    finally:
        for each in put_back:
            each()


def _parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterable[Tensor]:
    """Those of the model and of all optimizers, which may train more than it, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return dict.fromkeys((*model.parameters(), *(each for group in groups for each in group["params"])))


def _model_kept(model: nn.Module) -> Iterator[PutBack]:
    for module in model.modules():
        yield kept(module._buffers)


def _optimizer_kept(optimizer: Optimizer) -> Iterator[PutBack]:
    yield kept(optimizer.state)
    for group in optimizer.param_groups:
        yield partial(_settings_back, group, {name: kept(each) for name, each in group.items() if name != "params"})


def _settings_back(group: dict[str, Any], settings: dict[str, PutBack]) -> None:
    group.update({name: back() for name, back in settings.items()})


def _with_gradient(parameter: Tensor) -> PutBack:
    values, gradient = kept(parameter), kept(parameter.grad)

    def put_back() -> None:
        values()
        parameter.grad = gradient()

    return put_back


def kept(value: Any) -> PutBack:
    """Return what gives `value` back: the same tensor, dict or list, with the contents that it has now."""
    if isinstance(value, Tensor):
        return _tensor_kept(value)
    if isinstance(value, dict):
        entries = {key: kept(entry) for key, entry in value.items()}
        return lambda: _refilled(value, {key: back() for key, back in entries.items()})
    if isinstance(value, list):
        items = [kept(item) for item in value]
        return lambda: _refilled_list(value, [back() for back in items])
    return lambda: value


def _tensor_kept(tensor: Tensor) -> PutBack:
    own: Any = tensor.detach()
    own = own.to_local() if is_sharded(tensor) else own
    # In host memory: on the device a second copy of the model could be what makes the largest batch too large.
    values = own.to("cpu", copy=True)

    def put_back() -> Tensor:
        own.copy_(values)
        return tensor

    return put_back


def _refilled(table: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    table.clear()
    table.update(entries)
    return table


def _refilled_list(items: list[Any], contents: list[Any]) -> list[Any]:
    items[:] = contents
    return items


def _random_kept(device: torch.device) -> Iterator[PutBack]:
    """Python's, numpy's and torch's generators, those of all GPUs, and the one of the sketches' signs."""
    python, of_numpy, of_torch, signs = (
        random.getstate(),
        numpy.random.get_state(),
        torch.get_rng_state(),
        signs_state(device),
    )
    yield lambda: random.setstate(python)
    yield lambda: numpy.random.set_state(of_numpy)
    yield lambda: torch.set_rng_state(of_torch)
    yield lambda: load_signs_state(device, signs)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        of_gpus = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(of_gpus)
