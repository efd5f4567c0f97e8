"""An experiment as the text of a file that `divebatch run` takes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from divebatch.lab.experiments import Experiment
from divebatch.lab.experiments.schema import Part


def to_toml(experiment: Experiment, *, comment: str = "") -> str:
    """Read back, it is equal to `experiment`."""
    lines = [f"# {line}" for line in comment.splitlines()]
    values = {entry.name: getattr(experiment, entry.name) for entry in fields(experiment) if entry.name != "methods"}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    lines += _pairs(plain)
    for name in [name for name in values if name not in plain]:
        lines += ["", f"[{name}]", *_pairs(_plain(values[name]))]
    for name, method in experiment.methods.items():
        lines += ["", f"[methods.{_key(name)}]", *_pairs(_plain(method))]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses as tables, without what is None: a missing key means the same."""
    if isinstance(value, Part):
        return {"kind": value.kind, **{key: _plain(item) for key, item in value.settings.items()}}
    if hasattr(value, "__dataclass_fields__"):
        values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return {key: _plain(item) for key, item in values.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(key)} = {_value(value)}" for key, value in table.items())


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
