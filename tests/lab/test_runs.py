"""Runs and their records, also in parallel processes; every policy of the experiments that compare them."""

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import divebatch.lab.runs as run_module
from divebatch.errors import CheckpointError, RecordError
from divebatch.lab import Experiment, Run, default_jobs, execute, execute_all, get_experiment, make_trainer
from divebatch.lab.schema import Part
from divebatch.records import read_run
from lab.helpers import assert_same_end, kill_after, records, shrunk
from reference.per_sample import diversity as diversity_by_loop

KEYS = {
    *("epoch", "batch_size", "lr", "steps", "samples", "train_loss", "val_loss", "val_accuracy", "diversity"),
    *("exact_diversity", "train_seconds", "total_seconds", "peak_memory_bytes"),
}


def small(name: str = "synthetic-nonconvex", epochs: int = 4) -> Experiment:
    return shrunk(name, epochs, 2_000, 16)


@pytest.mark.parametrize("method", ["sgd-small", "sgd-large", "divebatch", "oracle"])
def test_records_hold_what_the_contract_says(tmp_path, method):
    run = Run(small(), method, 3, tmp_path, log_exact=True)
    execute(run)
    assert run.records_path == tmp_path / "synthetic-nonconvex" / method / "seed-3.jsonl"
    lines = [json.loads(line) for line in run.records_path.read_text().splitlines()]
    assert lines[0]["kind"] == "run"
    assert lines[0]["config"]["method"]["batch_size"] == run.method.batch_size
    assert lines[0]["versions"]["torch"] == torch.__version__
    assert lines[0]["num_parameters"] == 16 + 1 + 1 + 1  # one hidden unit over 16 features
    assert [line["epoch"] for line in lines[1:]] == [1, 2, 3, 4]
    for line in lines[1:]:
        assert line["kind"] == "epoch"
        assert line.keys() >= KEYS
        assert line["samples"] == 1_600 * line["epoch"]
        assert line["exact_diversity"] > 0
        assert (line["diversity"] is not None) == (method in ("divebatch", "oracle"))
    if method == "oracle":
        assert [line["diversity"] for line in lines[1:]] == pytest.approx(
            [line["exact_diversity"] for line in lines[1:]]
        )


def test_the_learning_rate_is_start_times_batch_ratio_times_schedule(tmp_path):
    run = Run(small("synthetic-convex", epochs=10), "divebatch", 0, tmp_path)  # now decays every 2 epochs
    execute(run)
    _, epochs = read_run(run.records_path)
    assert len({record.batch_size for record in epochs}) > 1
    for record in epochs:
        schedule = 0.75 ** ((record.epoch - 1) // 2)
        assert record.lr == pytest.approx(16.0 * record.batch_size / 128 * schedule)


def test_exact_diversity_is_the_loop_over_samples_at_the_epochs_last_weights(tmp_path):
    trainer = make_trainer(Run(small(epochs=1), "divebatch", 0, tmp_path, log_exact=True))
    record = trainer.run_epoch()
    batches = list(trainer.control.loader.full_pass())
    slow = diversity_by_loop(trainer.model, trainer.loss_fn, batches)
    assert record.exact_diversity == pytest.approx(slow.value, rel=1e-4)


def test_a_kill_between_record_and_checkpoint_takes_the_record_back(tmp_path):
    whole, broken = Run(small(), "divebatch", 0, tmp_path / "a"), Run(small(), "divebatch", 0, tmp_path / "b")
    execute(whole)
    kill_after(broken, 2)
    lines = whole.records_path.read_text().splitlines(keepends=True)
    with broken.records_path.open("a") as file:
        file.write(lines[3] + lines[4][:20])  # epoch 3 recorded, epoch 4 half-written
    execute(broken, resume=True)
    assert_same_end(broken, whole)


def test_resume_starts_what_is_not_there_and_leaves_what_is_done(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run, resume=True)
    before = run.records_path.read_text()
    trained, there = [], []
    execute(run, resume=True, on_epoch=trained.append, on_resume=there.append)
    assert run.records_path.read_text() == before
    assert not trained
    assert [record.epoch for record in there] == [4]


def test_other_records_in_the_folder_are_never_touched(tmp_path):
    run = Run(small(), "divebatch", 0, tmp_path)
    execute(run)
    before = run.records_path.read_text()
    with pytest.raises(RecordError, match=r"already holds a run\. Continue it with --resume"):
        execute(run)
    with pytest.raises(CheckpointError, match="another configuration: epochs is 4 there and 3 now"):
        execute(Run(small(epochs=3), "divebatch", 0, tmp_path), resume=True)
    assert run.records_path.read_text() == before


@pytest.mark.slow
def test_parallel_processes_give_what_one_gives(tmp_path):
    def runs(folder: Path) -> list[Run]:
        return [Run(small(epochs=2), "divebatch", seed, folder) for seed in (0, 1)]

    heard: list[tuple[int, int]] = []
    for folder, jobs in (("one", 1), ("two", 2)):
        failed = execute_all(
            runs(tmp_path / folder), jobs=jobs, resume=False, on_epoch=lambda i, record: heard.append((i, record.epoch))
        )
        assert failed == []
        assert sorted(heard[-4:]) == [(i, epoch) for i in range(2) for epoch in (1, 2)]
    for one, two in zip(runs(tmp_path / "one"), runs(tmp_path / "two"), strict=True):
        first, second = records(one), records(two)
        assert [line["batch_size"] for line in first] == [line["batch_size"] for line in second]
        assert [line["val_loss"] for line in first] == pytest.approx([line["val_loss"] for line in second], rel=1e-4)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of processes")
def test_jobs_count_the_cores_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert (default_jobs("cpu", 5), default_jobs("cuda", 5)) == (1, 1)
    finally:
        os.sched_setaffinity(0, before)
    assert default_jobs("cpu", 10**6) == len(before)


def test_warm_up_grows_with_every_step_and_multiplies_the_schedule(tmp_path):
    experiment = small(epochs=4)
    method = replace(experiment.method("sgd-small"), warmup_epochs=2)
    run = Run(replace(experiment, methods={"warm": method}), "warm", 0, tmp_path)
    trainer = make_trainer(run)
    rates = []
    for _ in range(4):
        trainer.run_epoch(after_step=lambda: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    steps = len(trainer.control.loader)
    expected = [  # after step k: the warm-up of step k + 1 and the schedule of the epoch under way
        method.lr * 0.75 ** (k // steps) * min(1.0, (k + 2) / (2 * steps)) for k in range(4 * steps)
    ]
    assert rates == pytest.approx(expected)


def test_a_finished_run_leaves_nothing_behind_in_memory(tmp_path, monkeypatch):
    alive: list[weakref.ref] = []

    def remembered(run: Run):
        trainer = make_trainer(run)
        alive.extend([weakref.ref(trainer.model), weakref.ref(trainer.control.loader)])
        return trainer

    monkeypatch.setattr("divebatch.lab.runs.make_trainer", remembered)
    execute(Run(small(epochs=2), "divebatch", 0, tmp_path))
    assert len(alive) == 2
    assert [reference() for reference in alive] == [None, None]


def test_the_commit_of_a_repository_around_the_package_is_not_recorded(monkeypatch, tmp_path):
    """Installed into an environment inside somebody's project, git would tell of theirs."""
    commit = run_module._git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "a" / "b" / "c" / "runs.py"))
    assert run_module._git_commit() is None


BRING_THEIR_OWN = {"divebatch", "noise-doubling"}
"""Methods that measure without naming an estimator."""


def all_policies() -> Experiment:
    experiment = shrunk("policies-synthetic", 3, 1_500, 16)
    methods = {
        key: replace(method, every_steps=2 if method.every_steps else None)
        for key, method in experiment.methods.items()
    }
    return replace(experiment, methods=methods)


@pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # the experiment has no momentum
@pytest.mark.parametrize("method", get_experiment("policies-synthetic").methods)
def test_every_method_runs_and_says_what_it_did(tmp_path: Path, method: str):
    run = Run(all_policies(), method, 0, tmp_path)
    execute(run)
    header, epochs = read_run(run.records_path)
    assert header.config["method"]["every_steps"] == (2 if method == "noise-doubling-steps" else None)
    assert [record.epoch for record in epochs] == [1, 2, 3]
    assert all(record.val_accuracy is not None for record in epochs)
    measures = header.config["method"]["estimator"] is not None
    assert any(record.measured for record in epochs) == (measures or method in BRING_THEIR_OWN)


def test_a_method_that_decides_within_epochs_records_where(tmp_path: Path):
    experiment = all_policies()
    slowly = replace(experiment.method("padadamp"), every_steps=4)
    run = Run(replace(experiment, methods={"padadamp": slowly}), "padadamp", 0, tmp_path)
    execute(run)
    _, epochs = read_run(run.records_path)
    # A tenth of a sample a step, ten steps an epoch, and a rate that falls to three quarters with each.
    assert [record.changes for record in epochs] == [[(4, 129, 16.0)], [(14, 130, 12.0)], [(24, 131, 9.0)]]
    assert [record.batch_size for record in epochs] == [129, 130, 131]


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
    run = Run(watched(all_policies()), "sgd-small", 0, tmp_path / "a")
    alone = Run(all_policies(), "sgd-small", 0, tmp_path / "b")
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
