"""Which extras are installed, by the package's own metadata."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

NOT_FOR_USERS = ("all", "dev", "dist", "docs")
NAME = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?([^;]*)")
COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, "<": lt, ">": gt}
EXTRA = re.compile(r"""extra == ["']([\w.-]+)["']""")


class Wanted(NamedTuple):
    """A package that an extra needs, such as typer with ">=0.16.1"."""

    package: str
    bounds: str


def wanted_by_extra() -> dict[str, list[Wanted]]:
    """Each extra with the packages it needs, those of the extras that it includes among them; none if not installed."""
    try:
        lines = [line for line in requires("divebatch") or [] if EXTRA.search(line)]
    except PackageNotFoundError:
        return {}
    direct: dict[str, list[str]] = {}
    for line in lines:
        for extra in EXTRA.findall(line):
            direct.setdefault(extra, []).append(line)
    return {extra: _packages(extra, direct) for extra in direct if extra not in NOT_FOR_USERS}


def _packages(extra: str, direct: dict[str, list[str]]) -> list[Wanted]:
    found: list[Wanted] = []
    for line in direct.get(extra, []):
        if (match := NAME.match(line)) is None:
            continue
        package, included, bounds = match.groups()
        if package == "divebatch":
            found += [each for other in (included or "").split(",") for each in _packages(other, direct)]
        else:
            found.append(Wanted(package, bounds.strip()))
    return list(dict.fromkeys(found))


class State(NamedTuple):
    """How a package stands: its version or what is wrong, in words."""

    text: str
    is_good: bool


def state_of(wanted: Wanted) -> State:
    """Look for a package.

    >>> state_of(Wanted("no-such-package", ">=1"))
    State(text='missing', is_good=False)
    """
    try:
        there = version(wanted.package)
    except PackageNotFoundError:
        return State("missing", is_good=False)
    if fits(there, wanted.bounds):
        return State(there, is_good=True)
    return State(f"{there} (wanted: {wanted.bounds})", is_good=False)


def fits(there: str, bounds: str) -> bool:
    """Whether a version lies within bounds, which are joined by commas.

    >>> fits("2.6.6", "<2.7,>=2.6.6"), fits("2.7.0", "<2.7,>=2.6.6"), fits("13.0.0", ">=10.3")
    (True, False, True)
    """
    told = re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", bounds)
    return all(COMPARE[sign](_numbers(there), _numbers(bound)) for sign, bound in told)


def _numbers(text: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0): enough to compare releases."""
    numbers = [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]
    return tuple((*numbers, 0, 0, 0)[:3])
