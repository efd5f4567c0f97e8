"""Files made to do harm: pickles that call, experiments and records of absurd values. Each must be refused by name.

Checkpoints have the right checksums, as whoever forges a file would give them.
"""

import builtins
import importlib
import io
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import DivebatchError
from divebatch.lab import Run, check_parts, execute, get_experiment
from divebatch.lab.checkpoint import previous
from divebatch.records import read_run
from faults.hostile_text import COMMAND_LINES, EXPERIMENTS, LINES, experiment_text
from faults.outcome import Outcome, Verdict
from faults.processes import divebatch, in_child
from faults.runs import write_images
from faults.shop import Shop
from faults.small import begin, copied, resumed, small

SENTINEL = "harm-was-done"


class Call:
    """Unpickled by an ordinary unpickler, it calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


TOUCH, WRITE = f"touch {SENTINEL}", f"open({SENTINEL!r}, 'w').close()"
CALLS = {
    "os.system": Call(os.system, TOUCH),
    "eval": Call(eval, WRITE),
    "exec": Call(builtins.exec, WRITE),
    "open": Call(open, SENTINEL, "w"),
    "subprocess": Call(subprocess.check_call, ["touch", SENTINEL]),
    "getattr": Call(getattr, Call(importlib.import_module, "os"), "system"),
    "torch.load": Call(torch.load, "other.ckpt"),
}
BOMBS = {
    "a nest of 50 000 lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "a string of 2 GiB": b"\x80\x02T\xff\xff\xff\x7f.",
    "a bytearray of 2^62 bytes": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
    "a memo of four billion places": b"\x80\x02Nr\xff\xff\xff\xff.",
    "tuples that hold themselves twice, 60 deep": b"\x80\x02)" + b"2\x86" * 60 + b".",
    "no end": b"\x80\x02]" + b"(" * 1000,
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pevil\n.",
    "nothing": b"",
    "noise": bytes(range(256)) * 8,
}
PICKLES = {**{name: pickle.dumps(call, protocol=2) for name, call in CALLS.items()}, **BOMBS}


def tries(shop: Shop) -> Iterator[Outcome]:
    for family in (checkpoints, datasets, experiments, records):
        yield from in_child(shop.log(), family, shop.fresh("hostile"))
    for words in COMMAND_LINES[: shop.tries(quick=3, full=len(COMMAND_LINES))]:
        command = divebatch(shop.log(), *words, "--out", str(shop.fresh("words")))
        code = command.end()
        verdict: Verdict = "hung" if code is None else "traceback" if command.has_traceback else "refused"
        yield Outcome("hostile words of a command", "mixed up" if code == 0 else verdict, " ".join(words)[:60])


def checkpoints(folder: Path) -> Iterator[Outcome]:
    os.chdir(folder)
    run = begin(Run(small(), "divebatch", 0, folder / "run"))
    payloads = {**PICKLES, **{f"{name}, in torch's archive": archived(each) for name, each in PICKLES.items()}}
    payloads |= {"an archive of 1 GiB in 1 MiB": bomb()}
    for name, payload in payloads.items():
        mixed = copied(run, folder / "mixed")
        for path in (mixed.checkpoint_path, previous(mixed.checkpoint_path)):
            path.write_bytes(payload)
        verdict, detail = resumed(mixed, run)
        yield harmless("hostile checkpoint", verdict, f"{name}: {detail[-60:]}", folder)


def datasets(folder: Path) -> Iterator[Outcome]:
    os.chdir(folder)
    write_images(folder / "data" / "cifar-10-batches-py", per_file=4)
    experiment = get_experiment("cifar10", ["model.kind=resnet20"]).scaled(1)
    for number, (name, payload) in enumerate(PICKLES.items()):
        (folder / "data" / "cifar-10-batches-py" / "data_batch_1").write_bytes(payload)
        run = Run(experiment, "sgd-small", number, folder / "runs", data_dir=folder / "data")
        verdict, detail = refused(lambda run=run: execute(run))
        yield harmless("hostile dataset", verdict, f"{name}: {detail[-60:]}", folder)


def experiments(folder: Path) -> Iterator[Outcome]:
    path = folder / "hostile.toml"
    for name in EXPERIMENTS:
        path.write_text(experiment_text(name))
        verdict, detail = refused(lambda: check_parts(get_experiment(str(path))))
        yield Outcome("hostile experiment file", verdict, f"{name[:40]}: {detail[:60]}")


def records(folder: Path) -> Iterator[Outcome]:
    path = folder / "seed-0.jsonl"
    for name, line in LINES.items():
        path.write_text(line + "\n")
        verdict, detail = refused(lambda: read_run(path))
        yield Outcome("hostile records", verdict, f"{name}: {detail[-60:]}")


def refused(work: Callable[[], object]) -> tuple[Verdict, str]:
    try:
        work()
    except DivebatchError as error:
        return "refused", str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "mixed up", "taken"


def harmless(fault: str, verdict: Verdict, detail: str, folder: Path) -> Outcome:
    """The same, unless its code ran."""
    ran = [path for path in (folder / SENTINEL, folder.parent / SENTINEL) if path.exists()]
    for path in ran:
        with suppress(OSError):
            path.unlink()
    return Outcome(fault, "mixed up", f"its code ran: {detail}") if ran else Outcome(fault, verdict, detail)


def archived(pickled: bytes) -> bytes:
    """What torch.save writes, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data.pkl", "w") as entry:
        for _ in range(1024):
            entry.write(bytes(2**20))
    return buffer.getvalue()
