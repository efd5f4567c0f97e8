"""Whose a checkpoint is: the run's configuration, seed, data and records, and the code that wrote it, all compared."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from divebatch import __version__
from divebatch.errors import CheckpointError
from divebatch.lab.experiments.run import Run
from divebatch.lab.training.forward import has_batch_norm
from divebatch.records import EpochRecord, RunHeader

logger = logging.getLogger(__name__)

MICRO_BATCH = "micro_batch_size"
MAY_CHANGE = {"summary", "paper", "trials", f"training.{MICRO_BATCH}"}
"""Settings that may differ between a run and its resume: words, and how a batch is cut to fit into memory."""


class RecordsSoFar:
    """A fingerprint of a run's records, which grows with them: a digit that is changed on disk changes it.

    Args:
        header: The first line, whose configuration is left out: it is compared setting by setting.
        epochs: Those that are recorded already.
    """

    def __init__(self, header: RunHeader, epochs: Iterable[EpochRecord] = ()) -> None:
        self._hash = hashlib.sha256(_as_read_back(replace(header, config={})))
        for record in epochs:
            self.add(record)

    def add(self, record: EpochRecord) -> None:
        """One more epoch."""
        self._hash.update(_as_read_back(record))

    @property
    def fingerprint(self) -> str:
        """Of all so far."""
        return self._hash.hexdigest()


def _as_read_back(record: RunHeader | EpochRecord) -> bytes:
    """Its line without what reading leaves out, such as numbers that are too large."""
    return type(record).from_dict(json.loads(record.to_json())).to_json().encode()


def identity_of(run: Run, data: str, records: RecordsSoFar) -> dict[str, Any]:
    """What a checkpoint of this run says of itself; `data` is the fingerprint of its samples."""
    return {"divebatch": __version__, "config": run.config, "data": data, "records": records.fingerprint}


def without_identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint by itself, which a trainer loads."""
    return {key: value for key, value in state.items() if key != "identity"}


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


def require_records(run: Run, path: Path, state: Mapping[str, Any], records: RecordsSoFar) -> None:
    """Raise unless a run's records are still those that its checkpoint followed.

    Args:
        run: The run that wants to go on.
        path: The checkpoint's place, for the error.
        state: Its state, as `require_own` has found it.
        records: Those on disk, up to the checkpoint.
    """
    if state["identity"].get("records") != records.fingerprint:
        raise CheckpointError(
            f"'{run.records_path}' was changed after its checkpoint '{path}' was written, or is damaged. Put the "
            f"records back, or remove '{run.records_path.stem}.*' to start this run again."
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
