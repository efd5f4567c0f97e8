"""Argument checks that every part shares. Each raises an `ArgumentError` that names the argument and its value."""

import sys
from typing import Any

from divebatch.errors import ArgumentError


def require_count(name: str, value: Any, *, at_least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `at_least`; True and False are no integers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ArgumentError(f"{name} must be an integer of at least {at_least}, got {name}={value!r}")


def require_positive(name: str, value: Any, *, above: float = 0) -> None:
    """Raise unless `value` is a finite number above `above`; NaN fails too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
        wanted = f"above {above:g}" if above else "positive"
        raise ArgumentError(f"{name} must be {wanted} and finite, got {name}={value!r}")


def require_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise ArgumentError(f"unknown {name} {value!r}; known: {', '.join(map(str, known))}")
