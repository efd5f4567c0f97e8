"""Objects of a user's own by an import path, `module:function`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from divebatch.errors import ArgumentError

WANTED = "(model, loss_fn, dataset) or (model, loss_fn, dataset, optimizer)"


def is_import_path(text: str) -> bool:
    """Whether it can be no experiment's name."""
    return ":" in text and not text.endswith(".toml")


def call_own(path: str) -> tuple[Any, Any, Any, Any]:
    """Import the module, also from the present folder, and call the function: this runs the user's code."""
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"cannot import '{path}': {error}") from error
    if not callable(function):
        raise ArgumentError(f"'{path}' must be a function that returns {WANTED}, got {type(function).__name__}")
    made = function()
    if not isinstance(made, tuple | list) or len(made) not in (3, 4):
        got = f"{len(made)} objects" if isinstance(made, tuple | list) else type(made).__name__
        raise ArgumentError(f"'{path}' must return {WANTED}, got {got}")
    model, loss_fn, dataset = made[:3]
    return model, loss_fn, dataset, made[3] if len(made) == 4 else None
