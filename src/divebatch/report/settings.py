"""Where the numbers come from: the configurations and the surroundings of an experiment's runs, as tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from divebatch.report.runs import Experiment, Run
from divebatch.report.table import MISSING, Table

MAX_VALUES = 4
"""So many different values of one setting are listed; the rest is counted."""
HIDDEN = frozenset({"seed", "trials", "name", "summary"})
"""Settings that are told better elsewhere: from the runs that there are, or in the heading."""


def settings_tables(experiment: Experiment) -> list[Table]:
    """Settings that all runs share, settings that differ between methods, and what the runs ran on."""
    configs = {method: [_flat(run.header.config) for run in runs] for method, runs in experiment.methods.items()}
    keys = _keys(config for group in configs.values() for config in group)
    shown = {key: [_distinct(group, key) for group in configs.values()] for key in keys}
    shared = [[key, cells[0]] for key, cells in shown.items() if len(set(cells)) == 1]
    differing = [[key, *cells] for key, cells in shown.items() if len(set(cells)) > 1]
    tables = [
        Table("Settings of all runs", ["setting", "value"], shared, []),
        Table("Settings that differ", ["setting", *configs], differing, []),
        Table("Versions and hardware", ["item", "value"], _surroundings(experiment.runs), []),
    ]
    return [table for table in tables if table.rows]


def summary_line(experiment: Experiment) -> str:
    """The experiment in a sentence, as its configuration has it; empty where it has none."""
    texts = {str(run.header.config.get("summary", "")) for run in experiment.runs}
    return texts.pop() if len(texts) == 1 else ""


def _surroundings(runs: Sequence[Run]) -> list[list[str]]:
    items = [_surrounding(run) for run in runs]
    return [[key, _distinct(items, key)] for key in _keys(items)]


def _surrounding(run: Run) -> dict[str, str]:
    header = run.header
    return {
        **_flat({"versions": header.versions, "hardware": header.hardware}),
        "git commit": MISSING if header.git_commit is None else str(header.git_commit),
        "seeds": str(header.seed),
    }


def _keys(items: Iterable[Mapping[str, str]]) -> list[str]:
    return [key for key in dict.fromkeys(key for item in items for key in item) if key not in HIDDEN]


def _distinct(items: Sequence[Mapping[str, str]], key: str) -> str:
    """The values that occur, in order of appearance."""
    values = list(dict.fromkeys(item.get(key, MISSING) for item in items))
    rest = [f"and {len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
    return ", ".join(values[:MAX_VALUES] + rest)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys, values as JSON without the quotes of plain text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
