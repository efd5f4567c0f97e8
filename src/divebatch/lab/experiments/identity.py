"""Whose a checkpoint is: the run's configuration, its seed, its data and the code that wrote it, all compared."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from divebatch import __version__
from divebatch.errors import CheckpointError
from divebatch.lab.experiments.run import Run
from divebatch.lab.training.forward import has_batch_norm

logger = logging.getLogger(__name__)

MICRO_BATCH = "micro_batch_size"
MAY_CHANGE = {"summary", "paper", "trials", f"training.{MICRO_BATCH}"}
"""Settings that may differ between a run and its resume: words, and how a batch is cut to fit into memory."""


def identity_of(run: Run, data: str) -> dict[str, Any]:
    """What a checkpoint of this run says of itself; `data` is the fingerprint of its samples."""
    return {"divebatch": __version__, "config": run.config, "data": data}


def require_own(run: Run, path: Path, state: Mapping[str, Any], *, data: str | None = None) -> None:
    """Raise unless a checkpoint was written by this run; its data is compared once they are read.

    Args:
        run: The run that wants to go on.
        path: The checkpoint's place, for the error.
        state: Its state, of which this looks at `identity`.
        data: The fingerprint of the samples at hand; None where they are not read yet.
    """
    found = state.get("identity")
    if not isinstance(found, Mapping) or not isinstance(found.get("config"), Mapping):
        raise CheckpointError(f"checkpoint '{path}' does not say whose it is. {_way_out(run)}")
    for what, there, here in _differences(run, found, data):
        raise CheckpointError(
            f"checkpoint '{path}' belongs to another run: {what} is {there!r} there and {here!r} here. {_way_out(run)}"
        )


def tell_of_micro_batches(run: Run, state: Mapping[str, Any], model: nn.Module) -> None:
    """Warn where a resume cuts batches otherwise and that changes more than rounding.

    Args:
        run: The run that goes on.
        state: Its own checkpoint's, as `require_own` has found it.
        model: What is trained.
    """
    before, now = state["identity"]["config"]["training"].get(MICRO_BATCH), run.experiment.training.micro_batch_size
    if before != now and has_batch_norm(model):
        logger.warning(
            "'%s' goes on with micro_batch_size=%s after %s: BatchNorm takes its statistics from each micro-batch, so "
            "the run is no longer the one that was begun",
            run.records_path,
            now,
            before,
        )


def _differences(run: Run, found: Mapping[str, Any], data: str | None) -> Iterator[tuple[str, Any, Any]]:
    yield from differences(found["config"], run.config)
    if found.get("divebatch") != __version__:
        yield "the version of divebatch", found.get("divebatch"), __version__
    if data is not None and found.get("data") != data:
        yield "the fingerprint of the data", found.get("data"), data


def _way_out(run: Run) -> str:
    return f"Put the run's own checkpoint back, or remove '{run.records_path.stem}.*' to start it again."


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Where two configurations differ, setting by setting; a run may go on for more epochs than it was planned for."""
    may_be_longer = not here.get("one_pass")  # whose epochs are parts of it
    for place, (one, other) in _leaves(there, here, ""):
        is_longer = place == "epochs" and may_be_longer and isinstance(one, int) and other > one
        if place not in MAY_CHANGE and not is_longer:
            yield place, one, other


def _leaves(there: Mapping[str, Any], here: Mapping[str, Any], place: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in sorted({*there, *here}, key=str):
        one, other, name = there.get(key), here.get(key), f"{place}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _leaves(one, other, f"{name}.")
        elif one != other:
            yield name, (one, other)
