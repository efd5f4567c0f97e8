"""Argument checks that every part shares. Each raises an `ArgumentError` that names the argument and its value."""

import sys
from typing import Any

from divebatch.errors import ArgumentError


def require_count(name: str, value: Any, *, at_least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `at_least`; True and False are no integers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ArgumentError(f"{name} must be an integer of at least {at_least}, got {name}={value!r}")


def require_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a positive, finite number; NaN fails too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ArgumentError(f"{name} must be positive and finite, got {name}={value!r}")


def require_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise ArgumentError(f"unknown {name} {value!r}; known: {', '.join(map(str, known))}")
