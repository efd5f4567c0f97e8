"""What a search varies: settings of one method, each over a list of values or a range."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from divebatch.errors import ArgumentError
from divebatch.lab.experiments import Method
from divebatch.policies import make_policy

Point = dict[str, int | float]
"""One value for each dimension, by name."""

PAPER_RATES = {"lr": (0.001, 0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0), "batch_size": (32, 64, 128, 256, 512)}
PAPER_SIZES = {"delta": (0.001, 0.01, 0.1, 1.0), "max_batch_size": (2048, 4096, 8192)}
OF_METHOD = ("lr", "batch_size", "warmup_epochs")
"""Settings that a method itself has; all others belong to its policy."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting and what it may be: one of `values`, or anything from the first to the second of `bounds`."""

    name: str
    values: tuple[int | float, ...] = ()
    bounds: tuple[int | float, int | float] | None = None
    """Both whole for whole numbers; searched on a logarithmic scale."""

    def __str__(self) -> str:
        """The text that `parse_space` reads."""
        if self.bounds is not None:
            return f"{self.name}={self.bounds[0]!r}..{self.bounds[1]!r}"
        return f"{self.name}={','.join(map(repr, self.values))}"


@dataclass(frozen=True, slots=True)
class Space:
    """All dimensions of a search."""

    dimensions: tuple[Dimension, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions, in the order given."""
        return tuple(dimension.name for dimension in self.dimensions)

    @property
    def is_grid(self) -> bool:
        """Whether every dimension is a list of values."""
        return all(dimension.bounds is None for dimension in self.dimensions)

    def points(self) -> Iterator[Point]:
        """Every combination, the last dimension changing fastest."""
        for values in itertools.product(*(dimension.values for dimension in self.dimensions)):
            yield dict(zip(self.names, values, strict=True))


def paper_space(method: Method) -> Space:
    """The paper's grid: delta and cap for DiveBatch, else learning rate and batch size."""
    grid: Mapping[str, tuple[int | float, ...]] = PAPER_SIZES if method.policy.kind == "divebatch" else PAPER_RATES
    return Space(tuple(Dimension(name, values) for name, values in grid.items()))


def parse_space(texts: Sequence[str]) -> Space:
    """From texts like `lr=0.1,1,2` (these values) or `lr=0.001..16` (anything between).

    >>> str(parse_space(["batch_size=32,64"]).dimensions[0])
    'batch_size=32,64'
    """
    dimensions = tuple(map(_parse, texts))
    names = [dimension.name for dimension in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"{name} is searched over twice")
    return Space(dimensions)


def with_point(method: Method, point: Mapping[str, int | float]) -> Method:
    """The same method with these settings; an `ArgumentError` where its policy does not take them."""
    own = {name: value for name, value in point.items() if name in OF_METHOD}
    of_policy = {name: value for name, value in point.items() if name not in OF_METHOD}
    policy = replace(method.policy, settings={**method.policy.settings, **of_policy})
    return replace(method, policy=policy, **own)  # type: ignore[arg-type]


def check_point(method: Method, point: Mapping[str, int | float]) -> None:
    """Raise before any work if a run with these settings could not start."""
    policy: Any = make_policy(method.policy.kind, **method.policy.settings)
    known = {entry.name for entry in fields(policy)}
    for name in point:
        if name not in OF_METHOD and name not in known:
            raise ArgumentError(
                f"nothing to search over called {name!r}; known: {', '.join((*OF_METHOD, *sorted(known)))}"
            )
    changed = with_point(method, point)
    if not (changed.lr > 0 and math.isfinite(changed.lr)):
        raise ArgumentError(f"lr must be positive, got lr={changed.lr}")
    make_policy(changed.policy.kind, **changed.policy.settings).check_start(changed.batch_size)


def corners(space: Space) -> Iterator[Point]:
    """Every combination of a grid; the ends of a range stand for it."""
    ends = [Dimension(each.name, each.bounds or each.values) for each in space.dimensions]
    yield from Space(tuple(ends)).points()


def slug(point: Mapping[str, int | float]) -> str:
    """Fit for a folder's name.

    >>> slug({"lr": 0.001, "batch_size": 32})
    'lr-0.001_batch_size-32'
    """
    return "_".join(f"{name}-{value!r}" for name, value in point.items()).replace("+", "")


def _parse(text: str) -> Dimension:
    name, separator, values = text.partition("=")
    if not separator or not re.fullmatch(r"[a-z_]+", name):
        raise ArgumentError(f"what to search over must be NAME=VALUE,VALUE or NAME=LOW..HIGH, got {text!r}")
    if ".." not in values:
        chosen = tuple(_number(value, text) for value in values.split(","))
        return Dimension(name, tuple(dict.fromkeys(chosen)))
    low, high = (_number(value, text) for value in values.split("..", 1))
    if not 0 < low < high:
        raise ArgumentError(f"{text}: a range must go upwards from above 0")
    return Dimension(name, bounds=(low, high))


def _number(text: str, where: str) -> int | float:
    for kind in (int, float):
        try:
            value: Any = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value  # type: ignore[no-any-return]
    raise ArgumentError(f"{where}: {text!r} is not a number")
