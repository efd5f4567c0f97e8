"""Records and experiment files made to do harm, and words of the command line that mean nothing."""

import functools
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import ArgumentError, DivebatchError, MissingExtraError, RecordError
from divebatch.lab import Run, check_parts, execute, execute_all, get_experiment
from divebatch.lab.schema import FOLDER
from divebatch.records import read_run
from lab.small_experiment import small

# Records

HEADER = {"kind": "run", "experiment": "a", "method": "b", "seed": 0}
EPOCH = {"kind": "epoch", "epoch": 1, "batch_size": 8, "lr": 0.1, "steps": 3, "samples": 20}
WRONG_HEADERS = {
    "experiment": [1],
    "method": True,
    "seed": "x",
    "config": None,
    "metric": "loss",
    "report": [1],
    "versions": 7,
    "hardware": "cpu",
}
WRONG_EPOCHS = {
    "epoch": 1.5,
    "batch_size": None,
    "lr": "<script>",
    "steps": True,
    "samples": [[1]],
    "val_loss": {"a": 1},
    "measured": 7,
    "reason": 7.5,
    "shadows": [],
    "changes": [[1, 2, 0.1], None],
}


def refuse(path: Path, *lines: str) -> None:
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(RecordError, match=r"seed-0\.jsonl'"):
        read_run(path)


@pytest.fixture
def records_path(tmp_path) -> Path:
    return tmp_path / "seed-0.jsonl"


@pytest.mark.parametrize(("key", "value"), WRONG_HEADERS.items())
def test_a_first_line_with_a_value_of_the_wrong_kind_is_refused(records_path, key, value):
    refuse(records_path, json.dumps({**HEADER, key: value}))


@pytest.mark.parametrize(("key", "value"), WRONG_EPOCHS.items())
def test_an_epoch_with_a_value_of_the_wrong_kind_is_refused(records_path, key, value):
    refuse(records_path, json.dumps(HEADER), json.dumps({**EPOCH, key: value}))


LINES = {
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a number of 5000 digits": json.dumps(EPOCH)[:-1] + ', "lr": ' + "9" * 5000 + "}",
    "not a number": json.dumps({**EPOCH, "train_loss": float("nan")}),
    "infinity": json.dumps({**EPOCH, "lr": float("inf")}),
    "no epoch": json.dumps({"kind": "epoch"}),
    "a word": '"epoch"',
    "a page": "<html><script>alert(1)</script></html>",
    "a NUL": "\0",
    "half an object": '{"kind": "epoch"',
    "two objects": json.dumps(EPOCH) * 2,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_hostile_line_is_refused(records_path, line):
    refuse(records_path, json.dumps(HEADER), line, json.dumps(EPOCH))
    refuse(records_path, line, json.dumps(EPOCH))


def test_the_lines_around_the_hostile_ones_are_good(records_path):
    records_path.write_text(json.dumps(HEADER) + "\n" + json.dumps({**EPOCH, "new": [1]}) + "\n")
    assert read_run(records_path)[1][0].batch_size == 8


def test_bytes_that_are_no_text_and_folders_are_refused(records_path, tmp_path):
    records_path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(RecordError, match=r"seed-0\.jsonl'"):
        read_run(records_path)
    run = Run(small(), "divebatch", 0, tmp_path)
    run.records_path.mkdir(parents=True)
    with pytest.raises(RecordError, match=r"seed-0\.jsonl'"):
        execute(run, resume=True)


@pytest.mark.parametrize("damage", [LINES["deep lists"], LINES["a page"], json.dumps({**HEADER, "config": [1]})])
def test_a_run_with_hostile_records_fails_alone_and_keeps_its_files(begun, damage):
    begun.records_path.write_text(damage + "\n")
    other = replace(begun, seed=1)
    failures = execute_all([begun, other], jobs=1, resume=True, on_epoch=lambda *_: None)
    assert [failure.run for failure in failures] == [begun]
    assert isinstance(failures[0].error, RecordError)
    assert begun.records_path.read_text() == damage + "\n"
    assert begun.checkpoint_path.exists()


# Experiment files

GOOD = (FOLDER / "synthetic-nonconvex.toml").read_text()
EDITS = [
    *(("epochs = 100", f"epochs = {value}") for value in ("0", "1.5", "true", "[]")),
    ("trials = 10", "trials = " + "9" * 5000),
    ("trials = 10", "trials = " + "[" * 100_000),
    ("batch_size = 512", "batch_size = 1e3"),
    *(("lr = 1.0", f"lr = {value}") for value in ("0", "nan", "1" + "0" * 400)),
    ("delta = 0.1", "delta = inf"),
    ('estimator = "oracle"', 'estimator = "os.system"'),
    ('policy = { kind = "fixed" }', 'policy = { kind = "fixed", evil = 1 }'),
    ('kind = "mlp"', "kind = 3"),
    ('name = "synthetic-nonconvex"', 'name = "../../harm"'),
    ("[methods.oracle]", '[methods."../../harm"]'),
    ("[optimizer]", "[training]\nmicro_batch_size = 0\n[optimizer]"),
    ("[data]", "[[data]]"),
]
PART_EDITS = [
    *(("momentum = 0.0", f"momentum = {value}") for value in ("-1.0", "nan", '"x"')),
    ("momentum = 0.0", 'kind = "__import__"'),
    *(("num_samples = 20000", f"num_samples = {value}") for value in ("-5", "1.5", "true")),
    ("train_fraction = 0.8", "train_fraction = 0.999999"),
    ('kind = "mlp"\nhidden_width = 1', 'kind = "os.system"'),
]


def named(edits: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(old, new, id=new[:40].replace("\n", ", ")) for old, new in edits]


def edited(folder: Path, old: str, new: str) -> Path:
    assert old in GOOD
    path = folder / "hostile.toml"
    path.write_text(GOOD.replace(old, new))
    return path


@pytest.mark.parametrize(("old", "new"), named(EDITS))
def test_a_hostile_experiment_is_refused_by_name(tmp_path, old, new):
    with pytest.raises(ArgumentError, match=r"hostile\.toml"):
        get_experiment(str(edited(tmp_path, old, new)))


@pytest.mark.parametrize(("old", "new"), named(PART_EDITS))
def test_a_hostile_setting_of_a_part_is_refused_before_any_work(tmp_path, old, new):
    experiment = get_experiment(str(edited(tmp_path, old, new)))
    with pytest.raises(ArgumentError, match=r"synthetic-nonconvex: (unknown )?(data|model|optimizer|schedule)"):
        check_parts(experiment)


def test_bytes_that_are_no_toml_are_refused(tmp_path):
    path = tmp_path / "hostile.toml"
    for content in (b"\xff\xfe", b"", b"<html>", b"\x80\x02."):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"hostile\.toml"):
            get_experiment(str(path))
    with pytest.raises(ArgumentError, match=r"nothing\.toml"):
        get_experiment(str(tmp_path / "nothing.toml"))


@pytest.mark.parametrize("value", ["1000000000000000000000000000000", "4611686018427387904"])
def test_what_only_torch_can_refuse_still_fails_its_own_run_alone(tmp_path, value):
    huge = get_experiment(str(edited(tmp_path, "num_features = 512", f"num_features = {value}")))
    runs = [Run(huge, "divebatch", 0, tmp_path), Run(small(), "divebatch", 1, tmp_path)]
    failures = execute_all(runs, jobs=1, resume=False, on_epoch=lambda *_: None)
    assert [failure.run for failure in failures] == runs[:1]


# Errors on their way out of a worker process


def errors() -> list[Callable[[], DivebatchError]]:
    leaves = [cls for cls in DivebatchError.__subclasses__() if cls is not MissingExtraError]
    return [*(functools.partial(cls, "a message") for cls in leaves), lambda: MissingExtraError("pillow", "images")]


@pytest.mark.parametrize("make", errors())
def test_every_error_survives_the_way_between_processes(make):
    error = make()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


# Words of the command line

RUN = ["run", "synthetic-convex", "--epochs", "1", "--trials", "1", "--jobs", "1"]
WORDS = [
    (["--model", "resnet9000"], "synthetic-convex: unknown model kind 'resnet9000'; known: logistic-regression, "),
    (["--model", "../../evil"], "known: logistic-regression, "),
    (["--set", "training.precision=fp8"], "unknown precision 'fp8'; known: fp32, tf32, bf16"),
    (["--set", "training.micro_batch_size=0"], "micro_batch_size"),
    (["--checkpoint-steps", "-1"], "--checkpoint-steps"),
    (["--seed", "-1"], "--seed"),
    (["--epochs", "many"], "--epochs"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_unknown_words_exit_with_2_before_anything_is_written(tmp_path, words, message):
    answer = CliRunner().invoke(app, [*RUN, "--out", str(tmp_path / "out"), *words])
    assert answer.exit_code == 2
    assert message in re.sub(r"\x1b\[[0-9;]*m", "", answer.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["no folder", "an empty one", "a file", "the dataset itself", "an empty dataset"])
def test_a_wrong_data_folder_fails_with_a_message(tmp_path, kind):
    folder = tmp_path / "data"
    if kind == "a file":
        folder.write_text("")
    elif kind != "no folder":
        (folder / "cifar-10-batches-py").mkdir(parents=True)
    data = {"the dataset itself": folder / "cifar-10-batches-py", "an empty one": tmp_path}.get(kind, folder)
    words = ["run", "cifar10", "--methods", "sgd-small", "--trials", "1", "--jobs", "1", "--data-dir", str(data)]
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2
    assert "cifar10 sgd-small seed 0: " in answer.output
    assert str(data) in answer.output
    assert "Traceback" not in answer.output
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
