"""Checkpoints come back as they were, replace each other in one step, and notice their own damage."""

import errno
import importlib
import io
import itertools
import logging
import os
import pickle
import random
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from divebatch.errors import CheckpointError
from divebatch.lab import execute, load_checkpoint, save_checkpoint
from divebatch.lab.checkpoint import load_newest, previous

CPU = torch.device("cpu")


def some_state(epoch: int) -> dict:
    """What a trainer saves, in small: tensors of many types, nested containers, numbers, words and nothing."""
    generator = torch.Generator().manual_seed(epoch)
    weights = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weights, "half": weights.bfloat16(), "count": torch.tensor(epoch), "none": torch.empty(0)},
        "optimizer": {"state": {0: {"momentum_buffer": -weights}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "control": {"epoch": epoch, "policy": "DiveBatch(delta=0.1)", "pass": None, "sums": weights.double().sum()},
        "clock": {"train": 1 / 3, "odd": float("inf")},
        "tally": (weights.sum(), 64),
        "random": generator.get_state(),
        "is_measuring": True,
    }


def assert_bit_equal(one, two) -> None:
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_bit_equal(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            assert_bit_equal(left, right)
    else:
        assert one == two


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "seed-0.ckpt"


def newest(path: Path) -> dict:
    found = load_newest(path, device=CPU)
    assert found is not None
    return found[1]


def names(path: Path) -> set[str]:
    return {each.name for each in path.parent.iterdir()}


# What is saved comes back


def test_a_state_comes_back_bit_for_bit_and_the_one_before_stays_beside_it(path):
    for epoch in (1, 2, 3):
        save_checkpoint(path, some_state(epoch))
    assert names(path) == {"seed-0.ckpt", "seed-0.ckpt.previous"}
    assert_bit_equal(load_checkpoint(path, device=CPU), some_state(3))
    assert_bit_equal(load_checkpoint(previous(path), device=CPU), some_state(2))


# Writes that fail


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STAGES = {"fsync": (os, "fsync", 1), "first rename": (Path, "replace", 1), "second rename": (Path, "replace", 2)}
STAGES["folder sync"] = (os, "fsync", 2)


def fail_at(monkeypatch, stage: str, error: BaseException) -> None:
    """Let a save fail at one stage."""
    owner, name, at = STAGES[stage]
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == at:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_save_leaves_a_good_checkpoint_and_no_scratch(path, monkeypatch, stage, error):
    save_checkpoint(path, some_state(1))
    save_checkpoint(path, some_state(2))
    raised = CheckpointError if error is FULL else KeyboardInterrupt
    message = r"cannot write checkpoint '.*seed-0\.ckpt': No space left on device" if error is FULL else None
    with monkeypatch.context() as broken:
        fail_at(broken, stage, error)
        with pytest.raises(raised, match=message):
            save_checkpoint(path, some_state(3))
    newest = some_state(3 if stage == "folder sync" else 2)
    assert_bit_equal(load_checkpoint(path, device=CPU), newest)
    assert not [name for name in names(path) if name.endswith(".tmp")]
    save_checkpoint(path, some_state(4))
    assert_bit_equal(load_checkpoint(path, device=CPU), some_state(4))


@pytest.mark.parametrize("most_bytes", [0, 2_000])
def test_a_write_cut_short_harms_nothing(path, most_bytes):
    """The system itself refuses to let any file grow beyond the limit, in the middle of a write."""
    save_checkpoint(path, some_state(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save_checkpoint(path, some_state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(path) == {"seed-0.ckpt"}
    assert_bit_equal(load_checkpoint(path, device=CPU), some_state(1))


@pytest.mark.parametrize("moment", ["half-written", "written", "between the renames"])
def test_what_a_kill_leaves_behind_is_good_and_goes_away(path, caplog, moment):
    """The files as they lie when the process dies at that moment."""
    save_checkpoint(path, some_state(1))
    save_checkpoint(path, some_state(2))
    scratch = path.with_name("seed-0.ckpt.tmp")
    scratch.write_bytes(path.read_bytes()[: 100 if moment == "half-written" else None])
    if moment == "between the renames":
        path.replace(previous(path))
    assert_bit_equal(newest(path), some_state(2))
    if moment == "between the renames":
        assert f"'{path}' is gone; continuing from the one before it, '{previous(path)}'" in caplog.text
    save_checkpoint(path, some_state(3))
    assert not scratch.exists()
    assert_bit_equal(newest(path), some_state(3))


# Damage


def is_noticed(path: Path, content: bytes) -> bool:
    """Whether the file is refused by name; where it is taken, it must hold what was saved."""
    path.write_bytes(content)
    try:
        found = load_checkpoint(path, device=CPU)
    except CheckpointError as error:
        return "seed-0.ckpt'" in str(error)
    assert_bit_equal(found, some_state(1))  # a bit of what no reader looks at
    return False


def test_no_flipped_bit_and_no_truncation_is_taken_for_another_state(path):
    save_checkpoint(path, some_state(1))
    good, chance = path.read_bytes(), random.Random(0)
    noticed = 0
    for place in (chance.randrange(8 * len(good)) for _ in range(500)):
        content = bytearray(good)
        content[place // 8] ^= 1 << place % 8
        noticed += is_noticed(path, bytes(content))
    assert noticed > 100
    assert all(is_noticed(path, good[:length]) for length in [0, len(good) - 1, *chance.sample(range(len(good)), 100)])


@pytest.mark.parametrize("damage", [b"", b"bad", None])
def test_a_damaged_one_is_named_and_the_one_before_it_used(path, caplog, damage):
    save_checkpoint(path, some_state(1))
    save_checkpoint(path, some_state(2))
    path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert_bit_equal(newest(path), some_state(1))
    assert f"'{path}'" in caplog.text
    assert f"continuing from the one before it, '{previous(path)}'" in caplog.text


def test_where_both_are_damaged_both_are_named(path):
    for each in (path, previous(path)):
        each.write_bytes(b"bad")
    with pytest.raises(CheckpointError) as caught:
        newest(path)
    assert f"'{path}'" in str(caught.value)
    assert f"'{previous(path)}'" in str(caught.value)
    assert "Remove the run's files to start it again" in str(caught.value)


def test_other_things_than_files_and_dicts_are_refused(path):
    path.mkdir()
    with pytest.raises(CheckpointError, match="directory"):
        load_checkpoint(path, device=CPU)
    path.rmdir()
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="it holds a list"):
        load_checkpoint(path, device=CPU)


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
    "getattr": Call(getattr, Call(importlib.import_module, "os"), "system"),
}
IN_TEXT = {
    "posix.system": f"cposix\nsystem\n(S'{TOUCH}'\ntR.".encode(),
    "a persistent id": b"Pevil\n.",
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
    return {
        "a zip that climbs out of its folder": plain.getvalue(),
        "a script": as_torch_archive(good, **{"archive/constants.pkl": good, "archive/code/a.py": WRITE.encode()}),
        "an archive without a pickle": as_torch_archive(good).replace(b"data.pkl", b"evil.pkl"),
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
