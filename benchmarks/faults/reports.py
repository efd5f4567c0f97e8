"""Reports that get SIGKILL while they are written over an older one: every file is the old one or the new one."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from faults.outcome import Outcome
from faults.processes import divebatch
from faults.shop import Shop

FAULT = "report: SIGKILL"
WRITING = 0.02
"""Seconds that it takes to write the files, about."""
Files = dict[str, bytes]


def tries(shop: Shop) -> Iterator[Outcome]:
    folder, before = shop.fresh("report"), shop.folder / "before-report"
    add_run(shop, folder, seed=0)
    divebatch(shop.log(), "report", str(folder)).end()
    old = files(folder)
    add_run(shop, folder, seed=1)
    shutil.copytree(folder, before)
    divebatch(shop.log(), "report", str(folder)).end()
    new = files(folder)
    for _ in range(shop.tries(quick=3, full=10)):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        yield one_try(shop, folder, old, new)


def one_try(shop: Shop, folder: Path, old: Files, new: Files) -> Outcome:
    report = divebatch(shop.log(), "report", str(folder))
    report.wait_for(lambda: any(folder.rglob("*.tmp")))
    time.sleep(shop.chance.uniform(0, WRITING))
    report.send(signal.SIGKILL)
    report.end()
    found = files(folder)
    torn = [name for name, content in found.items() if content not in (old.get(name), new.get(name))]
    renewed = sum(content == new[name] != old.get(name) for name, content in found.items() if name in new)
    if torn or old.keys() - found.keys():
        return Outcome(FAULT, "mixed up", f"torn or gone: {[*torn, *(old.keys() - found.keys())][:3]}")
    again = divebatch(shop.log(), "report", str(folder))
    code = again.end()
    if code != 0:
        return Outcome(FAULT, "hung" if code is None else "lost", again.last_words)
    is_new = files(folder) == new and not list(folder.rglob("*.tmp"))
    return Outcome(FAULT, "whole" if is_new else "lost", f"{renewed} files renewed")


def add_run(shop: Shop, folder: Path, *, seed: int) -> None:
    words = ["run", "synthetic-convex", "--epochs", "2", "--trials", "1", "--seed", str(seed), "--jobs", "1"]
    divebatch(shop.log(), *words, "--out", str(folder)).end()


def files(folder: Path) -> Files:
    """All but runs, locks and what a killed report left beside its files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".jsonl", ".ckpt", ".previous", ".tmp", ".lock")
    }
