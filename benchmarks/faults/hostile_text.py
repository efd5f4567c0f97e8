"""Experiment files, lines of records and words of a command that nobody means well with."""

import json
from typing import Any

from divebatch.lab import get_experiment
from divebatch.lab.search import to_toml

HEADER: dict[str, Any] = {"kind": "run", "experiment": "it", "method": "it", "seed": 0}
EPOCH: dict[str, Any] = {"kind": "epoch", "epoch": 1, "batch_size": 8, "lr": 0.1, "steps": 1, "samples": 8}


def _lines(*epochs: str) -> str:
    return "\n".join([json.dumps(HEADER), *epochs])


LINES = {
    "lists 100 000 deep": _lines("[" * 100_000 + "]" * 100_000),
    "objects 100 000 deep": _lines('{"a":' * 100_000 + "1" + "}" * 100_000),
    "a number of 5000 digits": _lines(json.dumps(EPOCH)[:-1] + ', "val_loss": ' + "9" * 5000 + "}"),
    "a batch size of 40 digits": _lines(json.dumps({**EPOCH, "batch_size": 10**40})),
    "not a number": _lines(json.dumps({**EPOCH, "lr": float("nan")})),
    "infinity": _lines(json.dumps({**EPOCH, "lr": float("inf")})),
    "a word for a number": _lines(json.dumps({**EPOCH, "lr": "x"})),
    "a list for a number": _lines(json.dumps({**EPOCH, "steps": [1]})),
    "true for a number": _lines(json.dumps({**EPOCH, "samples": True})),
    "no number at all": _lines(json.dumps({"kind": "epoch"})),
    "epochs backwards": _lines(json.dumps({**EPOCH, "epoch": 2}), json.dumps(EPOCH)),
    "changes that are none": _lines(json.dumps({**EPOCH, "changes": [["a"]]})),
    "shadows that are none": _lines(json.dumps({**EPOCH, "shadows": {"a": "b"}})),
    "a page": "<html><script>alert(1)</script></html>",
    "a NUL": "\0",
    "two objects in a line": _lines(json.dumps(EPOCH) * 2),
}
EXPERIMENTS = {
    **{f"epochs = {value}": ("epochs", value) for value in ("0", "-1", "1.5", '"x"', "nan", "9" * 5000)},
    **{f"trials = {value}": ("trials", value) for value in ("0", '"x"', "[" * 100_000)},
    **{f"batch_size = {value}": ("batch_size", value) for value in ("0", "-1", '"x"', "true")},
    **{f"lr = {value}": ("lr", value) for value in ("-1.0", "nan", "inf", "1e999", "1" + "0" * 400)},
    **{f"momentum = {value}": ("momentum", value) for value in ("-1.0", "nan", '"x"')},
    **{f"num_samples = {value}": ("num_samples", value) for value in ("-5", "0", "1.5", '"x"')},
    **{f"name = {value}": ("name", value) for value in ('"../../harm"', '"/harm"', '""')},
    **{f"kind = {value}": ("kind", value) for value in ('"os.system"', '"__import__"', "3")},
}
"""By what stands there: the first setting of that name, and its value."""
COMMAND_LINES = [
    ["run", "synthetic-convex", "--epochs", "1e999"],
    ["run", "synthetic-convex", "--model", "../../evil"],
    ["run", "synthetic-convex", "--set", "training.micro_batch_size=0"],
    ["run", "synthetic-convex", "--set", "seconds=nan"],
    ["run", "synthetic-convex", "--seed", "-1"],
    ["run", "../../etc/passwd"],
    ["search", "synthetic-convex", "--method", "sgd-small", "--over", "lr=nan"],
    ["search", "synthetic-convex", "--method", "sgd-small", "--over", "__class__=1"],
]


def experiment_text(name: str) -> str:
    """A good experiment file with one setting replaced."""
    key, value = EXPERIMENTS[name]
    lines = to_toml(get_experiment("synthetic-nonconvex")).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
    return "\n".join([*lines[:place], f"{key} = {value}", *lines[place + 1 :]]) + "\n"
