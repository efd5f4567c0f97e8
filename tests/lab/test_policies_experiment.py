"""The experiments that compare every policy: each of their methods trains, records and can be resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from divebatch.errors import CheckpointError
from divebatch.lab import Experiment, Run, execute, get_experiment, make_trainer
from divebatch.lab.schema import Part
from divebatch.records import EpochRecord, read_run

BRING_THEIR_OWN = {"divebatch", "auto"}
"""Methods that measure without naming an estimator."""


def small(name: str = "policies-synthetic", epochs: int = 3) -> Experiment:
    experiment = get_experiment(name).scaled(epochs)
    settings = {**experiment.data.settings, "num_samples": 1_500, "num_features": 16}
    methods = {
        key: replace(method, every_steps=2 if method.every_steps else None)
        for key, method in experiment.methods.items()
    }
    return replace(experiment, data=replace(experiment.data, settings=settings), methods=methods)


@pytest.mark.filterwarnings("ignore:.* the noise scale, and .moments.")  # the experiment has no momentum
@pytest.mark.parametrize("method", get_experiment("policies-synthetic").methods)
def test_every_method_runs_and_says_what_it_did(tmp_path: Path, method: str):
    run = Run(small(), method, 0, tmp_path)
    execute(run)
    header, epochs = read_run(run.records_path)
    assert header.config["method"]["every_steps"] == (2 if method == "auto-steps" else None)
    assert [record.epoch for record in epochs] == [1, 2, 3]
    assert all(record.val_accuracy is not None for record in epochs)
    measures = header.config["method"]["estimator"] is not None
    assert any(record.measured for record in epochs) == (measures or method in BRING_THEIR_OWN)


def test_a_policy_brings_its_estimator_where_the_method_names_none(tmp_path: Path):
    experiment = small()
    method = replace(experiment.method("auto"), estimator=None)
    run = Run(replace(experiment, methods={"auto": method}), "auto", 0, tmp_path)
    assert make_trainer(run).control.state_dict()["settings"]["estimator"] == "PerSample"  # there is no momentum


def test_a_method_that_decides_within_epochs_records_where(tmp_path: Path):
    experiment = small()
    slowly = replace(experiment.method("padadamp"), every_steps=4)
    run = Run(replace(experiment, methods={"padadamp": slowly}), "padadamp", 0, tmp_path)
    execute(run)
    _, epochs = read_run(run.records_path)
    # A tenth of a sample a step, ten steps an epoch, and a rate that falls to three quarters with each.
    assert [record.changes for record in epochs] == [[(4, 129, 16.0)], [(14, 130, 12.0)], [(24, 131, 9.0)]]
    assert [record.batch_size for record in epochs] == [129, 130, 131]


def test_sizes_rounded_for_a_compiler_stay_rounded(tmp_path: Path):
    experiment = small()
    methods = {name: replace(method, multiple_of=64) for name, method in experiment.methods.items()}
    run = Run(replace(experiment, methods=methods), "smith", 0, tmp_path)
    execute(run)
    sizes = [record.batch_size for record in read_run(run.records_path)[1]]
    assert sizes == [128, 128, 192]  # 170.7 and 227.6 rounded down


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path):
    run = Run(small(), "padadamp", 0, tmp_path)
    execute(run)
    first, *rest = run.records_path.read_text().splitlines()
    header = json.loads(first)
    header["config"]["method"]["multiple_of"] = 2
    run.records_path.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    with pytest.raises(CheckpointError, match="another configuration: method"):
        execute(run, resume=True)


def watched(experiment: Experiment) -> Experiment:
    shadows = {
        "pada": Part(kind="padadamp", settings=experiment.method("padadamp").policy.settings),
        "doubling": Part(kind="adabatch", settings={"max_batch_size": 512, "every_epochs": 2}),
        "noise": Part(kind="noise-scale", settings={"max_batch_size": 512}),
        "loss": Part(kind="adadamp", settings={"max_batch_size": 512}),
    }
    method = replace(experiment.method("sgd-small"), estimator="moments", shadows=shadows)
    return replace(experiment, methods={"sgd-small": method})


def test_shadows_of_a_method_are_recorded_and_change_nothing(tmp_path: Path):
    run, alone = Run(watched(small()), "sgd-small", 0, tmp_path / "a"), Run(small(), "sgd-small", 0, tmp_path / "b")
    execute(run)
    execute(alone)
    header, epochs = read_run(run.records_path)
    assert header.config["method"]["shadows"]["doubling"]["settings"] == {"max_batch_size": 512, "every_epochs": 2}
    assert [record.shadows["doubling"] for record in epochs] == [128, 256, 128]
    assert all(set(record.shadows) == {"pada", "doubling", "noise", "loss"} for record in epochs)
    assert all(record.measured for record in epochs)
    plain = read_run(alone.records_path)[1]
    assert [record.val_loss for record in epochs] == [record.val_loss for record in plain]
    assert [record.shadows for record in plain] == [None] * 3


def test_a_resume_keeps_to_the_shadows_it_began_with(tmp_path: Path):
    whole, run = (Run(watched(small()), "sgd-small", 0, tmp_path / name) for name in ("whole", "broken"))
    execute(whole)

    def stop(record: EpochRecord) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        execute(run, on_epoch=stop)
    with pytest.raises(CheckpointError, match="another configuration: method"):
        execute(replace(run, experiment=small()), resume=True)
    execute(run, resume=True)
    (_, expected), (_, epochs) = read_run(whole.records_path), read_run(run.records_path)
    assert [record.shadows for record in epochs] == [record.shadows for record in expected]
