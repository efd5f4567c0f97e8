"""Read tables of a TOML file as dataclasses; pydantic checks keys and values, and errors name both."""

import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from divebatch.checks import unknown
from divebatch.errors import ArgumentError

T = TypeVar("T")

# Types of fields, with the values that `build_table` accepts.
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def build_table(cls: type[T], values: Any, where: str = "") -> T:
    """Check a table's keys and types and build the dataclass `cls`; errors begin with `where`."""
    if isinstance(values, cls):
        return values
    try:
        if not isinstance(values, Mapping):
            raise ArgumentError(f"must be a table, got {reprlib.repr(values)}")
        checked = _checker(cls).model_validate(dict(values))  # type: ignore[arg-type]
        return cls(**{name: getattr(checked, name) for name in checked.model_fields_set})
    except (ValidationError, ArgumentError) as error:
        what = _first_problem(error, cls) if isinstance(error, ValidationError) else str(error)
        raise ArgumentError(f"{where}: {what}" if where else what) from error


@cache
def _checker(cls: Any) -> type[BaseModel]:
    """Return a pydantic model of a dataclass, with strict types and no other fields."""
    hints = get_type_hints(cls, include_extras=True)
    known: dict[str, Any] = {
        entry.name: (hints[entry.name], ... if entry.default is entry.default_factory is MISSING else None)
        for entry in fields(cls)
    }
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    return create_model(cls.__name__, __config__=config, **known)


def _first_problem(error: ValidationError, cls: type[Any]) -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(word) for word in problem["loc"] if "[" not in str(word))  # without a union's alternatives
    if problem["type"] == "extra_forbidden":
        return unknown("key", place, (entry.name for entry in fields(cls)))
    if problem["type"] == "missing":
        return f"missing key {place!r}"
    if problem["type"] == "value_error":
        return f"{place}: {problem['ctx']['error']}"
    return f"{place}: {problem['msg'].replace('Input should be', 'must be')}, got {reprlib.repr(problem['input'])}"
