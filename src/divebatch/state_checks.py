"""What a saved state must hold. Each part declares its fields next to its `state_dict`, and nothing odd is loaded.

A `Check` is called with a place, such as "control.loader.batch_size", and with what was found there. It raises a
`CheckpointError` that names both, and says what was expected. Checks are put together as states are: `table` for a
dict of known keys, `list_of`, `row_of`, `optional`. So a part's declaration becomes a field of the declaration of
whoever holds that part, and a state is checked as a whole before anything is changed.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from divebatch.errors import CheckpointError

Check = Callable[[str, Any], None]
"""Raises if the value at a place cannot be loaded."""

LARGEST = 2**53
"""The largest whole number that is taken for a count: a float still tells it from the next one."""


def wrong(place: str, value: Any, expected: str) -> CheckpointError:
    """The error for a value that cannot be loaded."""
    return CheckpointError(f"{place} is {reprlib.repr(value)} in the checkpoint, where {expected} is expected")


def inside(place: str, key: Any) -> str:
    """The place of an entry; the outermost has no name."""
    return f"{place}.{key}" if place else str(key)


def read(state: Any, place: str, check: Check) -> Any:
    """What stands at a place of the whole state, if `check` accepts it."""
    found, way = state, ""
    for key in place.split("."):
        way = inside(way, key)
        entries: Any = dict(enumerate(found)) if isinstance(found, list | tuple) else found
        index: Any = int(key) if isinstance(found, list | tuple) else key
        if not isinstance(entries, Mapping) or index not in entries:
            raise CheckpointError(f"{way} is missing from the checkpoint")
        found = entries[index]
    check(place, found)
    return found


# Single values


def anything(place: str, value: Any) -> None:
    """Accept every value."""


def text(place: str, value: Any) -> None:
    """Accept text."""
    if not isinstance(value, str):
        raise wrong(place, value, "text")


def truth(place: str, value: Any) -> None:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise wrong(place, value, "True or False")


def whole(at_least: int = 0, at_most: int | None = LARGEST) -> Check:
    """Accept whole numbers within bounds; True and False are none. Without `at_most` they may be of any size."""

    def check(place: str, value: Any) -> None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < at_least or (at_most is not None and value > at_most):
            upper = "" if at_most is None else f" and at most {at_most}"
            raise wrong(place, value, f"a whole number of at least {at_least}{upper}")

    return check


def number(*, at_least: float | None = None, above: float | None = None, finite: bool = True) -> Check:
    """Accept finite numbers within bounds; without `finite` also infinite ones, and NaN where there are no bounds."""
    bounds = f" of at least {at_least:g}" if at_least is not None else f" above {above:g}" if above is not None else ""

    def is_within(value: float) -> bool:
        # A whole number may be too large for a float, or for a tensor.
        is_sound = abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value) or not finite
        return is_sound and (at_least is None or value >= at_least) and (above is None or value > above)

    def check(place: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_within(value):
            raise wrong(place, value, f"a {'finite ' if finite else ''}number{bounds}")

    return check


def one_of(*known: Any) -> Check:
    """Accept these values."""

    def check(place: str, value: Any) -> None:
        if not any(_are_equal(value, each) for each in known):
            raise wrong(place, value, " or ".join(map(repr, known)))

    return check


def same(mine: Any) -> Check:
    """Accept what this run has."""

    def check(place: str, value: Any) -> None:
        if not _are_equal(value, mine):
            raise CheckpointError(f"{place} is {reprlib.repr(value)} in the checkpoint, and {mine!r} in this run")

    return check


def optional(inner: Check) -> Check:
    """Accept None, and what `inner` accepts."""

    def check(place: str, value: Any) -> None:
        if value is not None:
            inner(place, value)

    return check


def _are_equal(value: Any, mine: Any) -> bool:
    """Whether they are one value: 2 is 2.0, but True is not 1."""
    are_numbers = {type(value), type(mine)} == {int, float}
    return (are_numbers or type(value) is type(mine)) and bool(value == mine)


# Containers


def list_of(inner: Check, *, length: int | None = None, at_most: int | None = None, of: str = "entries") -> Check:
    """Accept lists and tuples of what `inner` accepts, of so many entries; `of` says what they are."""

    def check(place: str, value: Any) -> None:
        _require_list(place, value, length, of)
        if at_most is not None and len(value) > at_most:
            raise CheckpointError(f"{place} has {len(value)} entries in the checkpoint, where {at_most} are the most")
        for index, each in enumerate(value):
            inner(inside(place, index), each)

    return check


def row_of(*inner: Check, of: str = "entries") -> Check:
    """Accept lists and tuples with one entry for each check; `of` says what they are."""

    def check(place: str, value: Any) -> None:
        _require_list(place, value, len(inner), of)
        for index, (each, entry) in enumerate(zip(inner, value, strict=True)):
            each(inside(place, index), entry)

    return check


def table(fields: Mapping[Any, Check], *, some: bool = False) -> Check:
    """Accept dicts with exactly these keys, or with `some` of them; looked at in the order of the declaration."""

    def check(place: str, value: Any) -> None:
        _require_dict(place, value)
        for key, inner in fields.items():
            if key in value:
                inner(inside(place, key), value[key])
            elif not some:
                raise CheckpointError(f"{inside(place, key)} is missing from the checkpoint")
        for key in value:
            if key not in fields:
                raise CheckpointError(f"{inside(place, key)} is in the checkpoint, and nothing here knows it")

    return check


def table_of(keys: Check, values: Check) -> Check:
    """Accept dicts with any keys and values that the checks accept."""

    def check(place: str, value: Any) -> None:
        _require_dict(place, value)
        for key, each in value.items():
            keys(f"{place}: a key", key)
            values(inside(place, key), each)

    return check


def same_settings(mine: Mapping[str, Any]) -> Check:
    """Accept the settings of this run, tables of settings among them."""
    return table(
        {name: same_settings(each) if isinstance(each, Mapping) else same(each) for name, each in mine.items()}
    )


def _require_list(place: str, value: Any, length: int | None, of: str) -> None:
    if not isinstance(value, list | tuple):
        raise wrong(place, value, "a list")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{place} has {len(value)} {of} in the checkpoint, and {length} in this run")


def _require_dict(place: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise wrong(place, value, "a table")


def require_same(place: str, saved: Any, mine: Any) -> None:
    """Raise if a setting of a saved state is not the one of this run, naming the first place where they differ.

    Args:
        place: Where both stand, such as "control.settings".
        saved: The settings in the checkpoint.
        mine: Those of this run.
    """
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        for name in [*mine, *(name for name in saved if name not in mine)]:
            require_same(f"{place}.{name}", saved.get(name), mine.get(name))
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple) and len(mine) == len(saved):
        for number, (there, here) in enumerate(zip(saved, mine, strict=True)):
            require_same(f"{place}.{number}", there, here)
    elif not _are_equal(saved, mine) and (saved is not None or mine is not None):
        raise CheckpointError(f"{place} is {reprlib.repr(saved)} in the checkpoint, and {mine!r} in this run")
