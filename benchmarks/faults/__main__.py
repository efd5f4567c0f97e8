"""Faults made on purpose, and one table of what became of the runs that met them.

    python benchmarks/faults [--quick] [--only FAMILY ...] [--seed 0] [--json FILE]

Each try has a time limit. Exits with 1 if anything was lost, mixed up or hung. CPU, one thread a process; about ten
minutes on two free cores, three with --quick. A full disk needs the right to mount a small one.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# Before torch is imported, here and in the processes that are started.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

from faults.families import FAMILIES
from faults.shop import Shop
from faults.table import is_bad, show_table, show_try


def main() -> None:
    options = read_options()
    outcomes, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shop = Shop(Path(folder), options.quick, random.Random(options.seed))
        for name in options.only or FAMILIES:
            for outcome in FAMILIES[name](shop):
                show_try(outcome)
                outcomes.append(outcome)
    show_table(outcomes)
    print(f"in {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    raise SystemExit(int(is_bad(outcomes)))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer tries")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
