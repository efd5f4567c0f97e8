"""Who hovers over a public name finds each of its arguments."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
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


SOURCE = Path(__file__).parents[1] / "src" / "divebatch"
QUESTION = re.compile(r"\s*(What|Where|Who|How|Of|Those)\b")
UNWANTED = re.compile(r"\b(goes by|go by|in force|tells|stands in|goes on|so many)\b")
QUESTIONS_LEFT, UNWANTED_LEFT = 1, 0
"""Texts still to be written anew: lower these with each that is, and never raise them."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield where a docstring stands, and its text; strings below a constant or an attribute count as well."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            place = f"{file.relative_to(SOURCE)}: {getattr(node, 'name', 'module')}"
            if (found := ast.get_docstring(node)) is not None:
                yield place, found
            for above, each in pairwise(node.body):
                is_below = isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(each, ast.Expr)
                if is_below and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
                    yield place, each.value.value


def test_fewer_and_fewer_docstrings_begin_with_a_question_word() -> None:
    found = [f"{place}: {text.strip().splitlines()[0]}" for place, text in texts() if QUESTION.match(text)]
    assert len(found) <= QUESTIONS_LEFT, found


def test_fewer_and_fewer_docstrings_have_unwanted_phrases() -> None:
    found = [f"{place}: {match[0]}" for place, text in texts() if (match := UNWANTED.search(text)) is not None]
    assert len(found) <= UNWANTED_LEFT, found
