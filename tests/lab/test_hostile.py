"""Files made to do harm: none runs code, and each is refused with an error that names it."""

import functools
import importlib
import io
import os
import pickle
import zipfile
from typing import Any

import pytest
import torch

from divebatch.errors import CheckpointError
from divebatch.lab import execute, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
SENTINEL = "harm-was-done"


# Checkpoints that would run code


class Call:
    """Unpickled by an ordinary unpickler, it calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


TOUCH = f"touch {SENTINEL}"
WRITE = f"open({SENTINEL!r}, 'w').close()"
CALLS = {
    "os.system": Call(os.system, TOUCH),
    "eval": Call(eval, WRITE),
    "partial": Call(functools.partial(os.system, TOUCH)),
    "getattr": Call(getattr, Call(importlib.import_module, "os"), "system"),
    "torch.load": Call(torch.load, "other.ckpt", CPU, None),
}
IN_TEXT = {
    "posix.system": f"cposix\nsystem\n(S'{TOUCH}'\ntR.".encode(),
    "an instance": f"(S'{TOUCH}'\nios\nsystem\n.".encode(),
    "a nested name": b"\x80\x04\x8c\x05torch\x8c\x11serialization.os.\x93.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pevil\n.",
    "no end": b"\x80\x02]" + b"(" * 1000,
    "a string of 2 GiB": b"\x80\x02T\xff\xff\xff\x7f.",
}


def as_torch_archive(pickled: bytes, **entries: bytes) -> bytes:
    """What torch.save writes, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def archives() -> dict[str, bytes]:
    good = pickle.dumps({"model": {}}, protocol=2)
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr(f"../{SENTINEL}", "x")
        archive.writestr(f"/tmp/{SENTINEL}", "x")
    return {
        "a zip that climbs out of its folder": plain.getvalue(),
        "a script": as_torch_archive(good, **{"archive/constants.pkl": good, "archive/code/a.py": WRITE.encode()}),
        "an archive without a pickle": as_torch_archive(good).replace(b"data.pkl", b"evil.pkl"),
        "an archive cut short": as_torch_archive(good)[:-10],
        "nothing": b"",
        "noise": bytes(range(256)) * 8,
    }


PAYLOADS = {
    "a pickle alone": pickle.dumps(CALLS["os.system"], protocol=2),
    **{name: as_torch_archive(pickle.dumps({"model": call}, 2)) for name, call in CALLS.items()},
    **{name: as_torch_archive(text) for name, text in IN_TEXT.items()},
    **archives(),
    "deep": as_torch_archive(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch, payload):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "seed-0.ckpt"
    path.write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"seed-0\.ckpt'") as caught:
        load_checkpoint(path, device=CPU)
    assert "add_safe_globals" not in str(caught.value)  # torch tells how to run it all the same
    assert "False" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["seed-0.ckpt"]
    assert not (tmp_path.parent / SENTINEL).exists()


@pytest.mark.parametrize("name", ["os.system", "eval", "partial"])
def test_the_same_would_do_harm_elsewhere(tmp_path, monkeypatch, name):
    """Or the test above shows nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(CALLS[name]))
    assert (tmp_path / SENTINEL).exists()


# States of plain data that fit nothing


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`state` with another value, or none, at one place."""
    if not path:
        return value
    key, *rest = path
    others = {name: each for name, each in state.items() if name != key}
    return others if value is None and not rest else {**others, key: changed(state.get(key), tuple(rest), value)}


STATES = {
    "empty": ((), {}),
    "no control": (("control",), None),
    "loader of other data": (("control", "loader", "dataset_size"), 3),
    "model of another shape": (("model", "0.weight"), torch.zeros(2, 2)),
    "model with one more": (("model", "evil"), torch.zeros(2)),
    "two parameter groups": (("optimizer", "param_groups"), [{}, {}]),
    "no clock": (("clock",), None),
    "random state too short": (("random",), torch.zeros(3, dtype=torch.uint8)),
}


@pytest.mark.parametrize(("path", "value"), STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_is_refused_by_name(begun, path, value):
    state = load_checkpoint(begun.checkpoint_path, device=CPU)
    save_checkpoint(begun.checkpoint_path, changed(state, path, value))
    with pytest.raises(CheckpointError, match=r"seed-0\.ckpt'"):
        execute(begun, resume=True)
