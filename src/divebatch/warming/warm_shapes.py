"""Run each batch size that training can reach once before it begins, and put everything back."""

import copy
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from divebatch.checks import warn_user
from divebatch.controller import Controller
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError
from divebatch.warming.reachable_sizes import named_shapes, shapes_to_meet
from divebatch.warming.report import WarmedShape, WarmedShapes
from divebatch.warming.snapshot import nothing_changed

PASSES = 2
"""Steps of each kind at a size: the very first pass that a compiled meter measures runs uncompiled."""


def warm_shapes(
    step: Callable[[Any], Any],
    control: Controller,
    *,
    sizes: Collection[int] | None = None,
    also_restore: Sequence[Any] = (),
) -> WarmedShapes:
    """Compile for every batch size that the policy can reach, before training and not in the middle of it.

    A compiled model pays for each new batch size when it first comes, half a minute for a large one. This runs your
    step on real batches of each size, measured as they will be and unmeasured, and then puts everything back: weights,
    gradients, buffers, the optimizers and schedulers that the controller knows, random states (Python's, numpy's,
    torch's on all devices), the loader's position and the controller. Training goes on as if nothing had been run.

    Call it after the controller was made, or has loaded its state, and before the loop. All ranks call it alike. What
    your step counts or keeps by itself is not put back.

    Args:
        step: Your training step, `step(batch)`, on a batch as the loader delivers it: forward, backward, and the
            optimizer's step where that is compiled too.
        control: The controller of the training.
        sizes: The loader's batch sizes to be ready for, in samples. None for all that the policy can reach and the
            shorter last batches of their epochs; more than 16 batch sizes are an error that says how to make them few.
        also_restore: Other objects that the step changes, with `state_dict` and `load_state_dict`: a GradScaler, an
            average of the weights, a second model with buffers.

    Returns:
        What each size cost.
    """
    if not callable(step) or not isinstance(control, Controller):
        raise ArgumentError(
            f"warm_shapes takes your step and its controller, got a {type(step).__name__} and a "
            f"{type(control).__name__}: warm_shapes(step, control)"
        )
    _require_usable(control, also_restore)
    shapes = shapes_to_meet(control) if sizes is None else named_shapes(control, sizes)
    looks: list[Look] = []
    with _as_if_never_run(control, also_restore):
        for size, batch_sizes in shapes.items():
            looks += _looks_at(step, control, size, batch_sizes)
    _warn_of_limit(looks)
    return WarmedShapes(tuple(_summed(size, looks) for size in shapes))


@dataclass(frozen=True, slots=True)
class Look:
    """The steps of one kind, measured or not, at one size."""

    size: int
    seconds: float
    graphs: int


def _require_usable(control: Controller, also_restore: Sequence[Any]) -> None:
    if control._is_closed:
        raise UsageError("this controller was closed: warm_shapes() comes before close()")
    current = control.loader._passes.current
    if current is not None and current.is_open and not control.loader._passes.is_resumed:
        raise UsageError("warm_shapes within a loop over the loader would end its pass: call it before the loop")
    for each in also_restore:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ArgumentError(
                f"also_restore holds a {type(each).__name__}, which has no state_dict and load_state_dict: leave it "
                f"out, and put back yourself what the step changes in it"
            )


@contextmanager
def _as_if_never_run(control: Controller, also_restore: Sequence[Any]) -> Iterator[None]:
    """Inside, the controller hears of no batch; afterwards all stands where it stood."""
    rates = control._rates
    schedulers = [each for each in rates._schedulers if hasattr(each, "load_state_dict")]
    others = [(each, copy.deepcopy(each.state_dict())) for each in (*schedulers, *also_restore)]
    state, delivery_size = control.state_dict(), control.loader.delivery_size
    control._stop_listening()
    try:
        with nothing_changed(control._measuring.scene.model, rates._optimizers):
            yield
    finally:
        for each, saved in others:
            each.load_state_dict(saved)
        control.loader.delivery_size = delivery_size
        control._stop_listening = control.loader._listen(control._before_batch, controls=True)
        control.load_state_dict(state)  # last: it writes the rates that belong to its batch size


def _looks_at(
    step: Callable[[Any], Any], control: Controller, size: int, batch_sizes: Collection[int]
) -> Iterator[Look]:
    """Steps on batches of `size` samples, of each kind that comes while one of `batch_sizes` is in force."""
    measuring, unit = control._measuring, control._steps.unit
    kinds = set[bool]().union(*(measuring.kinds(control.epoch + 1, each * unit) for each in batch_sizes))
    for is_measured in sorted(kinds):
        graphs, begun = _num_graphs(), _now()
        if is_measured:
            measuring.start()
        for _ in range(PASSES if is_measured else 1):
            step(_delivered(control.loader, size))
        measuring.stop()
        yield Look(size, _now() - begun, _num_graphs() - graphs)


def _delivered(loader: AdaptiveLoader, size: int) -> Any:
    """The first batch of a pass that is left at once; where a step takes several deliveries, one of them."""
    loader.set_epoch(loader.epoch)
    if loader.delivery_size is None:
        loader.batch_size = max(size, loader.ranks.size)  # of a rest that not all ranks share, each runs one sample
    else:
        loader.delivery_size = size
    return next(iter(loader))


def _summed(size: int, looks: Sequence[Look]) -> WarmedShape:
    mine = [look for look in looks if look.size == size]
    return WarmedShape(size, sum(look.seconds for look in mine), sum(look.graphs for look in mine))


def _now() -> float:
    """The time when the devices are done with what they were given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _num_graphs() -> int:
    """Pieces of code that the compiler has made in this process; asked without loading it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _warn_of_limit(looks: Sequence[Look]) -> None:
    """Beyond its limit the compiler makes nothing more of a function and runs it as it is, which nobody notices."""
    config = sys.modules.get("torch._dynamo.config")
    if config is None:
        return
    compiled = [number for number, look in enumerate(looks) if look.graphs]
    left_out = [look.size for look in looks[compiled[-1] + 1 :]] if len(compiled) >= config.recompile_limit else []
    if left_out:
        warn_user(
            f"the compiler makes at most {config.recompile_limit} variants of a function, and batches of "
            f"{', '.join(map(str, dict.fromkeys(left_out)))} samples came after that: they run uncompiled. Before "
            f"anything is compiled write torch._dynamo.config.recompile_limit = {len(looks) + config.recompile_limit}"
        )
