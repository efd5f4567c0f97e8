"""Who hovers over a public name finds each of its arguments."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PARTS = tuple(f"divebatch{part}" for part in ("", ".policies", ".estimators", ".norms", ".data", ".research"))
ADAPTERS = (
    ("lightning", "BatchSizeCallback"),
    ("lightning", "NoiseScaleCallback"),
    ("transformers", "BatchSizeTrainer"),
    ("transformers", "NoiseScaleCallback"),
    ("accelerate", "make_controller"),
)


def public() -> Iterator[Callable[..., Any]]:
    """The public classes and functions that a user calls: no errors, no protocols."""
    named = {id(each): each for part in PARTS for each in exports(part) if callable(each)}
    for each in named.values():
        if not (isinstance(each, type) and (issubclass(each, Exception) or getattr(each, "_is_protocol", False))):
            yield each


def exports(part: str) -> list[Any]:
    module = importlib.import_module(part)
    return [getattr(module, name) for name in module.__all__]


def undocumented(function: Callable[..., Any]) -> list[str]:
    _, _, listed = (function.__doc__ or "").partition("Args:\n")
    names = inspect.signature(function).parameters
    return [name for name in names if not re.search(rf"^ +\*{{0,2}}{name}: \S", listed, re.MULTILINE)]


@pytest.mark.parametrize("function", list(public()), ids=lambda function: function.__name__)
def test_every_argument_is_listed(function: Callable[..., Any]) -> None:
    assert not undocumented(function)


@pytest.mark.parametrize(("framework", "name"), ADAPTERS)
def test_every_argument_of_an_adapter_is_listed(framework: str, name: str) -> None:
    pytest.importorskip(framework)
    assert not undocumented(getattr(importlib.import_module(f"divebatch.integrations.{framework}"), name))
