"""Runs of the lab whose numbers must not change by accident.

`python tests/baseline/runs.py OUT.json` writes what the installed package computes. Rewrite `numbers.json` only
together with a change that is meant to change numbers, and say so in the changelog.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

POLICIES = (
    "sgd-small,adabatch,adadamp,adascale,auto,noise-doubling,noise-doubling-split,noise-doubling-steps,cabs,"
    "divebatch-split,noise-scale,seesaw"
)
CASES: dict[str, list[str]] = {
    "synthetic-convex": ["--epochs", "6"],
    "synthetic-nonconvex": ["--epochs", "4"],
    "policies-synthetic": ["--epochs", "6", "--methods", POLICIES],
    "cifar10": ["--epochs", "3", "--model", "resnet20", "--methods", "adabatch,divebatch-every-epoch"],
    "lm-bytes": [
        *("--epochs", "6", "--model", "gpt-tiny", "--set", "training.precision=fp32"),
        *("--methods", "auto-16,noise-doubling-16"),
    ],
    "lm-tiny": ["--epochs", "6", "--methods", "seesaw,noise-doubling-16-adam"],
}
FIELDS = ("batch_size", "lr", "steps", "train_loss", "val_loss", "noise_scale", "next_batch_size")


def numbers(experiment: str, folder: Path) -> dict[str, list[list[Any]]]:
    """Run seed 0 of `experiment` on made-up data; return the fields of each epoch by method."""
    from lab.data.image_files import write_cifar10
    from lab.data.text_files import write_corpus

    data = folder / "data"
    if not data.exists():
        write_cifar10(data, per_file=64)
        write_corpus(data, train=400, valid=8)
    command = [sys.executable, "-m", "divebatch", "run", experiment, *CASES[experiment], "--trials", "1", "--quiet"]
    out = folder / "runs"
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # more of them add up in another order
    command += ["--jobs", "1", "--data-dir", str(data), "--out", str(out)]
    subprocess.run(command, check=True, env=one_thread)
    found = {}
    for path in sorted((out / experiment).glob("*/seed-0.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        epochs = [record for record in records if record["kind"] == "epoch"]
        found[path.parent.name] = [[epoch[field] for field in FIELDS] for epoch in epochs]
    return found


def processor() -> str:
    """Name the processor: other ones round otherwise."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: numbers(name, Path(folder)) for name in CASES}
    Path(sys.argv[1]).write_text(json.dumps({"processor": processor(), "numbers": found}, indent=None) + "\n")


if __name__ == "__main__":
    main()
