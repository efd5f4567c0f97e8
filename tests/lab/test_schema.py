"""Experiment files, settings and words of the command line, also those made to do harm."""

import copy
import functools
import json
import math
import pickle
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import ArgumentError, DivebatchError, MissingExtraError, RecordError
from divebatch.lab import Run, check_parts, execute_all, experiment_names, get_experiment, parse_experiment
from divebatch.lab.build import make_trainer
from divebatch.lab.schema import FOLDER
from divebatch.records import Metric, read_run
from lab.helpers import small


def table() -> dict:
    return copy.deepcopy(tomllib.loads((FOLDER / "synthetic-convex.toml").read_text()))


def test_every_file_of_the_catalog_reads_and_bears_its_name():
    assert {"synthetic-convex", "synthetic-nonconvex"} <= set(experiment_names())
    for name in experiment_names():
        assert get_experiment(name).name == name


def test_the_example_file_reads_and_has_shadows():
    watched = get_experiment(str(Path(__file__).parents[2] / "examples" / "watched.toml"))
    assert set(watched.method("sgd-small").shadows) == {"noise-scale", "noise-doubling", "adadamp", "simigrad"}


def test_the_papers_hyperparameters():
    convex, nonconvex = get_experiment("synthetic-convex"), get_experiment("synthetic-nonconvex")
    assert [(m.batch_size, m.lr) for m in convex.methods.values()] == [(128, 16), (4096, 512), (128, 16), (128, 16)]
    assert [(m.batch_size, m.lr) for m in nonconvex.methods.values()] == [(512, 1), (5028, 9.83), (512, 1), (512, 1)]
    assert convex.methods["divebatch"].policy.settings == {"delta": 1.0, "max_batch_size": 4096}
    assert nonconvex.methods["oracle"].policy.settings == {"delta": 0.1, "max_batch_size": 8192}
    assert (convex.epochs, convex.trials, nonconvex.epochs, nonconvex.trials) == (100, 10, 100, 10)


WORKLOADS = ["policies-cifar10", "policies-cifar100", "lm-bytes", "lm-124m"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_asks_whether_it_pays_has_a_sweep_a_customary_batch_and_auto(name):
    experiment = get_experiment(name)
    plain = [method for method in experiment.methods.values() if method.policy.kind == "fixed"]
    fixed = {method.batch_size for method in plain if method.lr_coupling is None}
    assert len(fixed) >= 5
    assert experiment.method(experiment.report.customary).policy.kind == "fixed"
    first = next(method for method in experiment.methods.values() if method.policy.kind == "auto")
    assert first.batch_size in fixed
    assert {method.policy.kind for method in experiment.methods.values()} > {"fixed", "auto"}
    check_parts(experiment)


def test_for_a_compiler_every_policy_keeps_to_few_sizes():
    """Those that go by doublings or a table need no rounding; SimiGrad goes by tenths, few of which are one of ours."""
    coarse = {"fixed", "adabatch", "auto", "noise-doubling", "geodamp", "sample-schedule", "plateau"}
    for name, ours in {"policies-synthetic": 64, "policies-cifar10": 256}.items():
        for method in get_experiment(name).with_training(compile=True).methods.values():
            multiple = max(method.multiple_of, method.policy.settings.get("multiple_of", 1))
            is_free = method.policy.kind in coarse or (method.policy.kind, name) == ("simigrad", "policies-synthetic")
            assert multiple == (1 if is_free else ours)


def change(path: str, value: object) -> dict:
    changed = table()
    *parents, last = path.split("/")
    place = changed
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return changed


WRONG = [
    ("colour", "red", r"unknown key 'colour'; known: name, summary"),
    ("methods/divebatch/batchsize", 5, r"methods.divebatch: unknown key 'batchsize': did you mean 'batch_size'"),
    ("methods/divebatch/policy/detla", 1.0, r"methods.divebatch.*detla"),
    ("methods/divebatch/policy/kind", "magic", r"kind must be one of fixed, adabatch, divebatch, .*, got 'magic'"),
    ("methods/divebatch/policy/delta", -1.0, r"delta must be positive and finite, got delta=-1.0"),
    ("methods/divebatch/policy/max_batch_size", 64, r"max_batch_size=64 is below the first batch size 128"),
    ("methods", None, r"missing key 'methods'"),
    ("epochs", "many", r"epochs: must be a valid integer, got 'many'"),
    ("epochs", True, r"epochs: must be a valid integer, got True"),
    ("epochs", 0, r"epochs: must be greater than or equal to 1, got 0"),
    ("held_out", 1.0, r"held_out: must be less than 1, got 1.0"),
    ("data", 3, r"data: kind must be a name, got 3"),
    ("task", {"kind": "sorting"}, r"task: kind must be one of classification, .*next-token.* got 'sorting'"),
    ("metric", "val_loss", r"metric: must be a table, got 'val_loss'"),
    ("metric", {"name": "speed"}, r"metric: name: must be 'val_accuracy', .*'bits_per_byte', got 'speed'"),
    ("metric", {"name": "bits_per_byte"}, r"metric.name must be one of val_accuracy, val_loss for the task"),
    ("report/baselines", [1], r"report: baselines.0: must be a valid string, got 1"),
    ("report/customary", "sgd", r"unknown method 'sgd'"),
]
WRONG_METHODS = [
    ("lr", -1.0, "lr: must be greater than 0, got -1.0"),
    ("batch_size", 0, "batch_size: must be greater than or equal to 1"),
    ("lr_coupling", "cubic", "lr_coupling: must be 'none', 'linear', .*, got 'cubic'"),
    ("lr_coupling", True, "lr_coupling: must be 'none', .*, got True"),
    ("lr_coupling", math.nan, "lr_coupling as a number .* lr_coupling=nan"),
    ("estimator", 3, "estimator: kind must be one of .*, got 3"),
    ("estimator", {"kind": "split", "every_steps": 0}, "estimator: every_steps must be an integer of at least 1"),
    ("estimator", {"kind": "split", "evry": 2}, "estimator: estimator 'split' cannot be .*evry"),
    ("policy", {"kind": "auto", "lr_coupling": "none"}, "policy: .*'auto' cannot be built .*lr_coupling"),
    ("shadows", {"a": 3}, "shadows.a: kind must be one of .*, got 3"),
    ("shadows", {"a": {"kind": "cabs"}}, "shadows.a: .*max_batch_size"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [*WRONG, *((f"methods/oracle/{key}", value, f"methods.oracle: {what}") for key, value, what in WRONG_METHODS)],
)
def test_wrong_files_are_refused_with_the_place_and_the_way_out(path, value, message):
    with pytest.raises(ArgumentError, match=message):
        parse_experiment(change(path, value), "file.toml")


def test_scaling_epochs_scales_every_epoch_counted_setting():
    experiment = parse_experiment(
        change("methods/sgd-small/policy", {"kind": "adabatch", "max_batch_size": 4096, "every_epochs": 20}),
        "file.toml",
    )
    short = experiment.scaled(40)
    assert (short.epochs, short.schedule.settings["every_epochs"]) == (40, 8)
    assert short.methods["sgd-small"].policy.settings["every_epochs"] == 8
    waiting = change("methods/sgd-small/policy", {"kind": "plateau", "max_batch_size": 4096, "patience": 5})
    assert parse_experiment(waiting, "file.toml").scaled(40).methods["sgd-small"].policy.settings["patience"] == 2
    assert experiment.scaled(1).schedule.settings["every_epochs"] == 1
    assert short.schedule.settings["factor"] == experiment.schedule.settings["factor"]


def test_shadows_are_policy_parts_and_shrink_with_the_epochs():
    watching = {
        "a": {"kind": "adabatch", "max_batch_size": 64, "every_epochs": 20},
        "b": {"kind": "auto", "max_batch_size": 8},
    }
    experiment = parse_experiment(change("methods/sgd-small/shadows", watching), "file.toml").scaled(40)
    shadows = experiment.methods["sgd-small"].shadows
    assert [(name, part.kind) for name, part in shadows.items()] == [("a", "adabatch"), ("b", "auto")]
    assert shadows["a"].settings == {"max_batch_size": 64, "every_epochs": 8}
    none = parse_experiment(change("methods/oracle/shadows", {}), "file.toml")
    assert none == parse_experiment(table(), "file.toml")
    assert none.methods["oracle"].shadows is none.scaled(40).methods["oracle"].shadows is None


@pytest.mark.parametrize(("coupling", "factor"), [(0.6, 4**0.6), (1, 4.0), ("sqrt", 2.0)])
def test_a_number_is_a_power_of_the_batch_size(tmp_path, coupling, factor):
    values = change("methods/sgd-small/lr_coupling", coupling)
    values["methods"]["sgd-small"]["base_batch_size"] = values["methods"]["sgd-small"]["batch_size"] // 4
    trainer = make_trainer(Run(parse_experiment(values, "file.toml"), "sgd-small", 0, tmp_path))
    assert trainer.control.lr == pytest.approx(values["methods"]["sgd-small"]["lr"] * factor)


def test_a_task_brings_its_metric_and_a_file_may_name_another():
    assert parse_experiment(change("name", "x"), "file.toml").metric == Metric("val_accuracy", "higher")
    table = change("task", {"kind": "next-token"})
    assert parse_experiment(table, "file.toml").metric == Metric("bits_per_byte", "lower")
    table["metric"] = {"name": "val_loss", "better": "lower"}
    assert parse_experiment(table, "file.toml").metric == Metric("val_loss", "lower")


# Settings on the command line


def test_settings_change_a_file_by_dotted_keys_and_toml_values():
    changes = [
        "training.precision=bf16",
        "methods.divebatch.lr=2",
        'model={kind = "mlp", hidden_width = 3}',
        "trials = 2",
    ]
    experiment = get_experiment("synthetic-convex", changes)
    assert experiment.training.precision == "bf16"
    assert experiment.method("divebatch").lr == 2.0
    assert (experiment.model.kind, experiment.model.settings, experiment.trials) == ("mlp", {"hidden_width": 3}, 2)
    other = get_experiment("synthetic-nonconvex", ["model.kind=logistic-regression"])
    assert other.model.settings == {}  # those of the other kind are gone
    compiled = get_experiment("synthetic-convex", ["training.compile=true"])
    assert [each.multiple_of for each in compiled.methods.values()] == [1, 1, 64, 64]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("evil=1", "unknown key 'evil'; known: name, summary"),
        ("training.precison=bf16", "training: unknown key 'precison': did you mean 'precision'"),
        ("training.precision=fp8", "unknown precision 'fp8'; known: fp32"),
        ("methods.sgd.lr=1", "unknown method 'sgd'"),
        ("epochs.x=1", "epochs is no table"),
        ("epochs=1.5", "epochs: must be a valid integer, got 1.5"),
        ("epochs", "a setting must be KEY=VALUE"),
        ("epochs=[", "is no value of TOML"),
    ],
)
def test_wrong_settings_name_their_key(setting, message):
    with pytest.raises(ArgumentError, match=message):
        get_experiment("synthetic-convex", [setting])


# Records

HEADER = {"kind": "run", "experiment": "a", "method": "b", "seed": 0}
EPOCH = {"kind": "epoch", "epoch": 1, "batch_size": 8, "lr": 0.1, "steps": 3, "samples": 20}
LINES = {
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "a number of 5000 digits": json.dumps(EPOCH)[:-1] + ', "lr": ' + "9" * 5000 + "}",
    "not a number": json.dumps({**EPOCH, "train_loss": float("nan")}),
    "no epoch": json.dumps({"kind": "epoch"}),
    "a word": '"epoch"',
    "a page": "<html><script>alert(1)</script></html>",
    "two objects": json.dumps(EPOCH) * 2,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_hostile_line_is_refused(tmp_path, line):
    path, good = tmp_path / "seed-0.jsonl", json.dumps(EPOCH)
    for lines in ([json.dumps(HEADER), line, good], [line, good]):
        path.write_text("".join(each + "\n" for each in lines))
        with pytest.raises(RecordError, match=r"seed-0\.jsonl'"):
            read_run(path)


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
    ("trials = 10", "trials = " + "9" * 5000),
    ("trials = 10", "trials = " + "[" * 100_000),
    ("lr = 1.0", "lr = nan"),
    ("lr = 1.0", "lr = 1" + "0" * 400),
    ("delta = 0.1", "delta = inf"),
    ('estimator = "oracle"', 'estimator = "os.system"'),
    ('policy = { kind = "fixed" }', 'policy = { kind = "fixed", evil = 1 }'),
    ('name = "synthetic-nonconvex"', 'name = "../../harm"'),
    ('name = "synthetic-nonconvex"', f'name = "{300 * "n"}"'),
    ("[methods.oracle]", '[methods."../../harm"]'),
    ("[optimizer]", "[training]\nmicro_batch_size = 0\n[optimizer]"),
    ("[data]", "[[data]]"),
    ("[data]", "\x00"),
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
    ([*RUN, "--model", "resnet9000"], "synthetic-convex: unknown model kind 'resnet9000': did you mean 'resnet20'"),
    ([*RUN, "--set", "training.precision=fp8"], "unknown precision 'fp8'; known: fp32, tf32, bf16"),
    ([*RUN, "--checkpoint-steps", "-1"], "--checkpoint-steps"),
    ([*RUN, "--trials", "10000000000"], "100000"),
    (["search", "synthetic-convex", "--trials", "10000000000"], "100000"),
    (["search", "synthetic-convex", "--study", "../x"], "a name must be up to 100 letters"),
]


@pytest.mark.parametrize(("words", "message"), WORDS)
def test_unknown_words_exit_with_2_before_anything_is_written(tmp_path, words, message):
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
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


def test_an_unknown_figure_is_named(tmp_path):
    path = tmp_path / "it.toml"
    path.write_text(GOOD.replace("figure1 =", "figure9 ="))
    answer = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2
    assert "unknown it.toml: [report] figure 'figure9'" in answer.output.replace(f"{tmp_path}/", "")
