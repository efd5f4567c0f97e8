"""Disks that are full at the first byte, at the records, at a checkpoint, or have room for no more files."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.courses import same_bits
from faults.outcome import Outcome, Verdict
from faults.processes import Command, divebatch
from faults.shop import Shop

PAGE = 4096
PLENTY = "size=64m,nr_inodes=10000"
RUN = ("run", "synthetic-nonconvex", "--methods", "divebatch", "--epochs", "3", "--trials", "1", "--quiet")
SEARCH = ("search", "synthetic-convex", "--method", "sgd-small", "--over", "lr=1,2", "--epochs", "2", "--quiet")
RECORDS = "out/synthetic-nonconvex/divebatch/seed-0.jsonl"


@dataclass(frozen=True)
class Disk:
    """A small one."""

    pages: int
    files: int = 100

    @property
    def fault(self) -> str:
        return "disk: no room for another file" if self.files < 100 else f"disk: full after {self.pages * 4} kB"


QUICK = [Disk(0), Disk(2), Disk(9), Disk(1000, files=4)]
MORE = [Disk(pages) for pages in (1, 3, 5, 7, 8, 10, 11)] + [Disk(1000, files=files) for files in (2, 3, 5, 6, 7, 8)]


def tries(shop: Shop) -> Iterator[Outcome]:
    if not may_mount(shop):
        print("disk: left out, since a small disk may not be mounted here")
        return
    whole = shop.fresh("whole")
    divebatch(shop.log(), *RUN, "--jobs", "1", "--out", str(whole / "out")).end()
    for disk in QUICK + ([] if shop.is_quick else MORE):
        yield one_try(shop, disk, RUN, "run", whole)
    for disk in QUICK[1:2] if shop.is_quick else QUICK:
        yield one_try(shop, disk, SEARCH, "search", None)


def one_try(shop: Shop, disk: Disk, words: tuple[str, ...], what: str, whole: Path | None) -> Outcome:
    fault = f"{disk.fault} ({what})"
    with mounted(shop.fresh("disk"), disk) as place:
        resume = ["--jobs", "1", "--resume"] if what == "run" else []
        command = divebatch(shop.log(), *words, *resume, "--out", str(place / "out"))
        verdict = judged(command, command.end())
        if verdict is not None:
            return Outcome(fault, verdict, command.last_words)
        make_room(place)
        again = divebatch(shop.log(), *words, *resume, "--out", str(place / "out"))
        if again.end() != 0:
            return Outcome(fault, "lost", again.last_words)
        is_whole = whole is None or same_bits(place / RECORDS, whole / RECORDS)
        return Outcome(fault, "whole" if is_whole else "mixed up", command.last_words.removeprefix("divebatch: "))


def judged(command: Command, code: int | None) -> Verdict | None:
    """None where it ended with one clear line, or had room enough."""
    if code is None:
        return "hung"
    return "traceback" if command.has_traceback or (code != 0 and "No space" not in said(command)) else None


def said(command: Command) -> str:
    return command.output.replace("disk is full", "No space").replace("the disk full", "No space")  # SQLite's words


@contextmanager
def mounted(place: Path, disk: Disk) -> Iterator[Path]:
    options = f"size={max(1, disk.pages) * PAGE},nr_inodes={disk.files}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)
    try:
        if disk.pages == 0:  # a disk without pages cannot be made
            (place / "filling").write_bytes(bytes(PAGE))
        yield place
    finally:
        unmount(place)


def make_room(place: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,{PLENTY}", str(place)], check=True, capture_output=True)


def unmount(place: Path) -> None:
    for _ in range(50):  # a process that was just killed may still hold it
        if subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)


def may_mount(shop: Shop) -> bool:
    if shutil.which("mount") is None:
        return False
    try:
        with mounted(shop.fresh("disk"), Disk(1)):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False
