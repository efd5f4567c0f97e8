"""Run records: what is written can be read, by us and by any reader of JSON lines."""

import ast
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType

import pytest

import divebatch
from divebatch import records
from divebatch.errors import ArgumentError, RecordError
from divebatch.records import (
    Change,
    EpochRecord,
    Metric,
    RecordWriter,
    ReportSettings,
    RunHeader,
    read_run,
)

HEADER = RunHeader(
    experiment="synthetic-convex",
    method="divebatch",
    seed=3,
    label="DiveBatch",
    metric=Metric("val_loss", "lower"),
    report=ReportSettings(
        baselines=["sgd-small"], order=["sgd-small", "divebatch"], chance=0.5, figures={"figure1": []}
    ),
    config={"policy": {"delta": 0.1}, "milestones": [1, 2], "név": "é\u2028\n"},
    versions={"torch": "2.13.0"},
    hardware={"cpus": 2},
    git_commit="abc",
    started="2026-01-01T00:00:00Z",
)
EPOCHS = [
    EpochRecord(epoch=1, batch_size=128, lr=0.1, steps=8, samples=1000, train_loss=0.5, diversity=0.0132, reason="r"),
    EpochRecord(epoch=2, batch_size=256, lr=0.2, steps=12, samples=2000, val_accuracy=0.75, peak_memory_bytes=10**12),
    EpochRecord(epoch=3, batch_size=256, lr=1 / 3, steps=16, samples=3000, next_batch_size=512, next_lr=0.4),
    EpochRecord(
        epoch=4, batch_size=512, lr=0.4, steps=20, samples=4000, changes=[Change(18, 512, 0.4)], shadows={"a": 1}
    ),
]
PROMISED_KEYS = {
    *("kind", "epoch", "batch_size", "lr", "steps", "samples", "train_loss", "val_loss", "val_accuracy"),
    *("diversity", "exact_diversity", "train_seconds", "total_seconds", "peak_memory_bytes"),
}
NOT_NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "synthetic-convex" / "divebatch" / "seed-3.jsonl"


def write(path, *written):
    with RecordWriter(path) as writer:
        for record in written:
            writer.write(record)


def strict_json(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


# Writing and reading


def test_what_is_written_is_read_back(path):
    write(path, HEADER, *EPOCHS)
    assert read_run(path) == (HEADER, EPOCHS)


def test_the_file_is_one_json_object_a_line_first_the_run_then_its_epochs(path):
    write(path, HEADER, *EPOCHS)
    lines = [strict_json(line) for line in path.read_bytes().decode("ascii").splitlines()]
    assert [line["kind"] for line in lines] == ["run", *4 * ["epoch"]]
    assert all(line.keys() >= PROMISED_KEYS for line in lines[1:])
    assert lines[0]["metric"] == {"name": "val_loss", "better": "lower"}
    assert (lines[1]["val_loss"], lines[4]["changes"]) == (None, [[18, 512, 0.4]])


def test_every_record_is_on_disk_when_write_returns(path):
    with RecordWriter(path) as writer:
        for number, record in enumerate([HEADER, *EPOCHS], 1):
            writer.write(record)
            assert path.read_text().count("\n") == number


@pytest.mark.parametrize("torn", ["", EPOCHS[1].to_json()[:20]])
def test_a_writer_continues_after_another_in_a_line_of_its_own(path, torn):
    write(path, HEADER, EPOCHS[0])
    with path.open("a") as file:
        file.write(torn)
    write(path, *EPOCHS[1:])
    assert read_run(path) == (HEADER, EPOCHS)


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("name", [entry.name for entry in fields(EpochRecord) if "float" in str(entry.type)])
def test_a_number_that_json_cannot_hold_becomes_null(name, value):
    line = strict_json(replace(EPOCHS[0], **{name: value}).to_json())
    assert line[name] is None


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_header_takes_any_mapping_with_null_at_any_depth(value):
    config = MappingProxyType({"a": [{"b": value}, (value, 1.0)], "c": MappingProxyType({"d": 1})})
    line = strict_json(replace(HEADER, config=config).to_json())
    assert line["config"] == {"a": [{"b": None}, [None, 1.0]], "c": {"d": 1}}


def test_keys_of_later_versions_are_ignored(path):
    path.parent.mkdir(parents=True)
    later = [{**strict_json(record.to_json()), "colour": "blue"} for record in [HEADER, *EPOCHS]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*later, {"kind": "colour"}]))
    assert read_run(path) == (HEADER, EPOCHS)


# Flaws


@pytest.mark.parametrize("left", [1, 20, -1, None])
def test_a_last_line_half_written_is_dropped(path, left):
    write(path, HEADER, *EPOCHS[:2])
    with path.open("a") as file:
        file.write(EPOCHS[2].to_json()[:left])
    assert read_run(path) == (HEADER, EPOCHS[:2])


@pytest.mark.parametrize("flaw", ['{"kind": "epoch", "epo', "garbage", "[1, 2]", "3"])
def test_a_flaw_in_the_middle_is_named_with_its_line(path, flaw):
    write(path, HEADER, *EPOCHS)
    lines = path.read_text().split("\n")
    lines[2] = flaw
    path.write_text("\n".join(lines))
    with pytest.raises(RecordError, match=r"seed-3.jsonl', line 3: not"):
        read_run(path)


@pytest.mark.parametrize("text", ["", "\n", '{"kind": "run"', EPOCHS[0].to_json() + "\n"])
def test_a_file_that_does_not_begin_with_a_run_is_no_record(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(RecordError, match="not a run record"):
        read_run(path)


@pytest.mark.parametrize("content", [None, b"\x80\x81\n"])
def test_a_file_that_is_not_there_or_not_text_is_named(path, content):
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    with pytest.raises(RecordError, match=r"seed-3.jsonl"):
        read_run(path)


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write records to .*file/seed-0.jsonl.*Choose another folder"):
        RecordWriter(tmp_path / "file" / "seed-0.jsonl")
    with pytest.raises(RecordError, match="cannot write records to"):
        RecordWriter(tmp_path)


def test_a_disk_that_fails_during_a_write_is_a_record_error(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with RecordWriter(path) as writer:
        monkeypatch.setattr(records.os, "fsync", full)
        with pytest.raises(RecordError, match=r"seed-3.jsonl.*No space left on device"):
            writer.write(HEADER)


WRONG_HEADERS = {
    "name must be one of val_accuracy, val_loss": {"metric": {"name": "speed", "better": "higher"}},
    "better must be one of higher, lower": {"metric": {"name": "val_loss", "better": "more"}},
    "name must be str": {"metric": {"name": 3}},
    "metric must be dict": {"metric": "val_loss"},
    "order and figures must be lists of method names": {"report": {"order": [1]}},
    "must be lists of method names, got 'all'": {"report": {"figures": {"figure1": "all"}}},
    "label must be str": {"label": None},
}
WRONG_EPOCHS = {
    "changes must be": {"changes": [[1, 2]]},
    "changes must be .*": {"changes": [[1, "more", 0.1]]},
    "shadows must be names with batch sizes": {"shadows": {"a": 1.5}},
    "shadows must be names with .*": {"shadows": {"a": True}},
    "steps is too large a number, of 401 digits": {"steps": 10**400},
    "epoch 1 follows epoch 1": {"epoch": 1},
    "lacks a key: .*batch_size": {"batch_size": ...},
}


@pytest.mark.parametrize(("problem", "values"), WRONG_HEADERS.items())
def test_a_wrong_header_is_named(path, problem, values):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**strict_json(HEADER.to_json()), **values}) + "\n")
    with pytest.raises(RecordError, match=f"seed-3.jsonl': .*{problem}"):
        read_run(path)


@pytest.mark.parametrize(("problem", "values"), WRONG_EPOCHS.items())
def test_a_wrong_epoch_is_named(path, problem, values):
    write(path, HEADER, EPOCHS[0])
    with path.open("a") as file:
        merged = {**strict_json(EPOCHS[1].to_json()), **values}
        file.write(json.dumps({key: value for key, value in merged.items() if value is not ...}) + "\n")
    with pytest.raises(RecordError, match=f"seed-3.jsonl':? {problem}"):
        read_run(path)


# The metric


def test_a_metric_says_which_value_is_better():
    accuracy, loss = Metric(), Metric("val_loss", "lower")
    record = replace(EPOCHS[0], val_accuracy=0.5, val_loss=math.inf)
    assert (accuracy.of(record), loss.of(record), loss.of(EPOCHS[0])) == (0.5, None, None)
    assert (accuracy.best([0.2, 0.3]), loss.best([0.2, 0.3]), loss.best([])) == (0.3, 0.2, None)
    assert (accuracy.worst, loss.worst) == (0.0, math.inf)
    with pytest.raises(ArgumentError, match="better must be"):
        Metric("val_loss", "smaller")


# Printing

PLAIN = EpochRecord(epoch=3, batch_size=128, lr=0.1, steps=1, samples=1)
PRINTED = {
    "epoch 3  diversity 0.0132  batch 128 -> 256  lr 0.1 -> 0.2": replace(
        PLAIN, diversity=0.0132, next_batch_size=256, next_lr=0.2, reason="delta * n * diversity = 256.0"
    ),
    "epoch 3  batch 128  lr 0.1": PLAIN,
    "epoch 3  diversity 0.01235  batch 128  lr 0.1": replace(
        PLAIN, diversity=0.0123456, next_batch_size=128, next_lr=0.1
    ),
    "epoch 3  batch 128 -> 256  lr 0.1 (times 2 a decision later)": replace(
        PLAIN, next_batch_size=256, next_lr=0.1, lr_owed=2.0
    ),
    "epoch 3  batch 1048576 -> 2097152  lr 1e-06": replace(
        PLAIN, batch_size=2**20, next_batch_size=2**21, lr=1e-6, next_lr=1e-6
    ),
    "epoch 3  batch to 64 then 128 -> 256  lr 0.1": replace(
        PLAIN, changes=[Change(3, 64, 0.1), Change(5, 64, 0.2), Change(9, 128, 0.1)], next_batch_size=256
    ),
    "epoch 3  batch to 128  lr 0.1": replace(PLAIN, changes=[Change(3, 128, 0.1)], next_batch_size=128),
    "epoch 3  batch to 32 then ... then 128  lr 0.1": replace(
        PLAIN, changes=[Change(step, size, 0.1) for step, size in enumerate((32, 48, 64, 96, 128))]
    ),
    "epoch 3  batch 128  lr 0.3": replace(PLAIN, lr=0.3, next_lr=3 * 0.1),
    "epoch 3  batch 128  lr 0.3 -> 0": replace(PLAIN, lr=0.3, next_lr=0.0),
    "epoch 3  noise scale > 253  batch 128, no change (wants at least 64)  lr 0.1": replace(
        PLAIN, noise_scale_low=253.0, reason="wants at least 64: no change"
    ),
    "epoch 3  noise scale unclear  batch 128, no change  lr 0.1": replace(
        PLAIN, measured=True, reason="the noise scale is not known, as the noise hides the gradient: no change"
    ),
}


@pytest.mark.parametrize(("text", "record"), PRINTED.items())
def test_a_record_prints_well(text, record):
    assert str(record) == text


def test_records_know_errors_and_nothing_else_of_ours():
    tree = ast.parse((Path(divebatch.__file__).parent / "records.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    ours = {name for name in modules if name.split(".")[0] in {"divebatch", "torch", "numpy"}}
    assert ours == {"divebatch.errors"}


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"noise_scale": 812.0, "noise_scale_low": 640.0, "noise_scale_high": 990.0}, "noise scale 812 (640-990)  "),
        ({"noise_scale_low": 640.0}, "noise scale > 640  "),
        ({"noise_scale": 812.0, "diversity": 0.02}, "noise scale 812  "),
        ({"diversity": 0.0132}, "diversity 0.0132  "),
        ({"noise_scale": 812.0, "noise_scale_low": 0.0}, "noise scale unclear  "),
        ({"measured": True}, "noise scale unclear  "),
        ({"measured": False, "train_loss": 0.5}, "not measured  "),
        ({"train_loss": 0.52341}, "loss 0.5234  "),
        ({"noise_scale": 812.0, "skipped_samples": 64}, "noise scale 812  64 samples left out  "),
        ({"noise_scale": 812.0, "skipped_samples": 0, "train_loss": 0.5}, "noise scale 812  "),
        ({}, ""),
    ],
)
def test_a_record_prints_what_was_measured(measured: dict[str, float], words: str):
    record = EpochRecord(
        epoch=3, batch_size=128, lr=0.1, steps=9, samples=9, next_batch_size=256, next_lr=0.2, **measured
    )
    assert str(record) == f"epoch 3  {words}batch 128 -> 256  lr 0.1 -> 0.2"
