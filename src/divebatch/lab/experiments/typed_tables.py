"""Tables of a TOML file as dataclasses. An unknown key is an error that names it and the known ones."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from divebatch.errors import ArgumentError

T = TypeVar("T")


def build_table(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return the dataclass `cls` with these values, each of the type that its field has; errors begin with `where`."""
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ArgumentError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    missing = [key for key, entry in known.items() if key not in values and _is_required(entry)]
    if missing:
        raise ArgumentError(f"{where}: missing key {missing[0]!r}")
    hints = get_type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise ArgumentError(f"{where}: {key} must be {_name(hints[key])}, got {value!r}")
    try:
        return cls(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kind = get_origin(hint) or hint
    # To Python True is an integer.
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_name(option) for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return getattr(hint, "__name__", str(hint))
