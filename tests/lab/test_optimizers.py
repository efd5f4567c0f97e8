from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from divebatch.errors import ArgumentError
from divebatch.lab import Run, check_parts, execute, get_experiment, make_trainer, parse_experiment
from divebatch.lab.optimizers import OPTIMIZERS, AdamW, Sgd
from divebatch.lab.schema import Method, Part
from divebatch.records import read_run


def test_sgd_is_what_an_experiment_gets_that_names_none():
    assert get_experiment("synthetic-convex").optimizer.kind == "sgd"
    optimizer = Sgd(momentum=0.9, weight_decay=0.1, nesterov=True).build(nn.Linear(2, 1), 0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "momentum", "weight_decay", "nesterov")} == {
        "lr": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "nesterov": True,
    }


def test_adamw_decays_matrices_alone_where_it_is_told():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = AdamW(beta2=0.95, weight_decay=0.1, decay_vectors=False).build(model, 1e-3)
    matrices, vectors = optimizer.param_groups
    assert [each.ndim for each in matrices["params"]] == [2]
    assert [each.ndim for each in vectors["params"]] == [1, 1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(group["betas"] == (0.9, 0.95) and group["lr"] == 1e-3 for group in optimizer.param_groups)
    (alone,) = AdamW().build(model, 1e-3).param_groups
    assert len(alone["params"]) == 4


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("adamw", {"beta1": 1.0}, "beta1 must be at least 0 and below 1"),
        ("adamw", {"eps": 0.0}, "eps must be positive"),
        ("adamw", {"momentum": 0.9}, "unknown key 'momentum'; known: beta1, beta2"),
        ("sgd", {"dampening": 0.1}, "unknown key 'dampening'; known: momentum, weight_decay"),
        ("sgd", {"nesterov": True}, "nesterov=True needs a momentum above 0"),
        ("sgd", {"weight_decay": -1.0}, "weight_decay must be positive"),
        ("lion", {}, "unknown optimizer kind 'lion'; known: sgd, adamw"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(kind, settings, message):
    experiment = replace(get_experiment("synthetic-convex"), optimizer=Part(kind=kind, settings=settings))
    with pytest.raises(ArgumentError, match=message):
        check_parts(experiment)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_experiment_trains_with_every_optimizer(tmp_path, kind):
    table = {"num_samples": 64, "num_features": 4, "noise_variance": 0.1, "train_fraction": 0.5}
    base = get_experiment("synthetic-convex").scaled(4)
    experiment = replace(base, data=Part(kind="synthetic", settings=table), optimizer=Part(kind=kind))
    whole = Run(experiment, "sgd-small", 0, tmp_path / "whole")
    execute(whole)
    losses = [record.train_loss for record in read_run(whole.records_path)[1]]
    assert losses[-1] < losses[0]


def test_an_experiment_lets_adams_settings_follow(tmp_path):
    base = get_experiment("synthetic-convex").scaled(4)
    table = {"num_samples": 64, "num_features": 4, "noise_variance": 0.1, "train_fraction": 0.5}
    grows = Part(kind="adabatch", settings={"max_batch_size": 32, "every_epochs": 1})
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling="adam", policy=grows)
    optimizer = Part(kind="adamw", settings={"beta2": 0.95, "decay_vectors": False})
    parts = {"data": Part(kind="synthetic", settings=table), "schedule": Part(kind="constant"), "optimizer": optimizer}
    experiment = replace(base, methods={"it": method}, **parts)
    trainer = make_trainer(Run(experiment, "it", 0, tmp_path))
    list(trainer.control.loader), trainer.control.step()
    used: list[dict[str, Any]] = []
    trainer.optimizer.register_step_pre_hook(lambda o, *_: used.extend(map(dict, o.param_groups)))
    trainer.optimizer.step()
    for group in used:
        assert (group["lr"], group["betas"]) == (pytest.approx(0.1 * 2**0.5), (0.9**2, 0.9025))
    assert [group["weight_decay"] for group in used] == pytest.approx([0.01 * 2**0.5, 0.0])


@pytest.mark.parametrize("kind", ["sgd"])
@pytest.mark.parametrize("by_policy", [False, True])
def test_adams_coupling_with_another_optimizer_is_refused_before_any_work(kind, by_policy):
    policy = Part(kind="auto", settings={"max_batch_size": 32} | ({"lr_coupling": "adam"} if by_policy else {}))
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling=None if by_policy else "adam", policy=policy)
    experiment = replace(get_experiment("synthetic-convex"), methods={"it": method}, optimizer=Part(kind=kind))
    with pytest.raises(ArgumentError, match=rf"\[methods.it\] has lr_coupling='adam'.*this one is '{kind}'"):
        check_parts(experiment)


def test_a_file_names_its_optimizer():
    table = {"kind": "adamw", "weight_decay": 0.1}
    experiment = {
        "name": "own",
        "summary": "",
        "paper": "",
        "trials": 1,
        "epochs": 1,
        "data": {"kind": "synthetic"},
        "model": {"kind": "mlp"},
        "schedule": {"kind": "constant"},
        "optimizer": table,
        "methods": {"a": {"label": "A", "batch_size": 8, "lr": 0.1, "policy": {"kind": "fixed"}}},
    }
    assert parse_experiment(experiment, "own").optimizer == Part(kind="adamw", settings={"weight_decay": 0.1})
