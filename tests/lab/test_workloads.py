"""The experiments that policies are scored on: their data, models and task, and the program that runs them."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from divebatch.errors import ArgumentError
from divebatch.lab import Run, execute, experiment_names, get_experiment
from divebatch.lab.data import DATASETS, DataPlace
from divebatch.lab.models import MODELS
from divebatch.lab.schema import Part
from divebatch.lab.tasks import TASKS
from divebatch.records import read_run
from lab.data.image_files import write_cifar10, write_cifar100
from lab.data.text_files import write_corpus

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frontier_runs

CPU = DataPlace(torch.device("cpu"))

SMALL = {
    "linear": {"num_samples": 512, "num_features": 20, "noise_variance": 0.5},
    "mlp": {"num_samples": 512, "num_features": 8, "noise_variance": 0.1, "teacher_width": 4, "num_judged": 64},
}


def test_the_linear_problem_is_judged_by_its_exact_excess_loss():
    data = DATASETS["linear-spectrum"](**SMALL["linear"])
    train, read_test, _ = data.parts(3, CPU)
    features, targets = train.content()
    variances = 1 / torch.arange(1, 21)
    torch.testing.assert_close(features.var(0), variances, rtol=0.3, atol=0.0)
    judged, answers = read_test().content()
    guess = torch.randn(20)
    true = torch.linalg.lstsq(judged, answers).solution
    exact = (variances * (guess - true) ** 2).sum()
    torch.testing.assert_close(((judged @ guess - answers) ** 2).mean(), exact, rtol=1e-4, atol=0.0)
    assert (targets - features @ true).var() == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("kind", ["linear-spectrum", "teacher-student"])
def test_drawn_data_follows_from_the_seed(kind):
    settings = SMALL["linear" if kind == "linear-spectrum" else "mlp"]
    first, again, other = (DATASETS[kind](**settings).parts(seed, CPU)[0].content() for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], other[1])


def test_a_lstm_sees_nothing_of_what_comes_after():
    torch.manual_seed(0)
    model = MODELS["lstm"](width=8).build(0, 256)
    tokens = torch.randint(256, (2, 12))
    later = tokens.clone()
    later[:, 7:] = (later[:, 7:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(later)
    assert before.shape == (2, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_convolutional_network_takes_images_of_a_cifar():
    model = MODELS["cnn"](widths=[8, 16]).build(0, 10)
    assert model(torch.randn(3, 3, 32, 32)).shape == (3, 10)


def test_a_linear_model_starts_at_zero_and_a_regression_is_a_mean_of_squares():
    outputs, task = MODELS["linear"]().build(5, 1)(torch.randn(7, 5)), TASKS["regression"]()
    assert not outputs.any()
    targets = torch.arange(7.0)
    assert task.loss_fn(outputs, targets) == 13.0
    assert task.conclude(task.judge(outputs, targets).tolist(), 7, 7).loss == 13.0
    with pytest.raises(ArgumentError, match="one number"):
        task.judge(outputs, targets[:, None])


def small(name: str, folder: Path):
    """The experiment at a size that takes a second."""
    experiment = get_experiment(name)
    kind = experiment.data.kind
    if kind == "text":
        write_corpus(folder)
        settings = {**experiment.model.settings, "width": 16, "sequence_length": 16}
        experiment = replace(experiment, samples=256)
        return replace(experiment, model=Part(kind=experiment.model.kind, settings=settings))
    if kind in ("linear-spectrum", "teacher-student"):
        settings = SMALL["linear" if kind == "linear-spectrum" else "mlp"]
        return replace(experiment, data=Part(kind=kind, settings=settings))
    (write_cifar10 if kind == "cifar10" else write_cifar100)(folder)
    return experiment.scaled(2)


@pytest.mark.parametrize("name", [each for each in experiment_names() if each.startswith("frontier-")])
def test_every_workload_runs(name, tmp_path, monkeypatch):
    experiment = small(name, tmp_path)
    for method in experiment.methods:
        run = Run(experiment, method, 0, tmp_path / "out", data_dir=tmp_path, checkpoint_every=99)
        execute(run)
        epochs = read_run(run.records_path)[1]
        assert epochs[-1].epoch == experiment.epochs
        assert math.isfinite(getattr(epochs[-1], experiment.metric.name))


# The program that runs them

WORKLOAD = frontier_runs.Workload("frontier-linear", (4, 8, 16, 32), (8, 0.1), 1.0, ["seesaw-doublings"], seeds=2)


def loss_law(point: frontier_runs.Point) -> float:
    """Best at a rate of 0.1 * size / 8; rises from 16 on."""
    best = math.log(point.lr / (0.1 * point.batch_size / 8))
    return 1 + 0.1 * best**2 + max(0.0, point.batch_size / 16 - 1)


def test_rates_are_tuned_between_worse_neighbours_before_seeds_are_compared(monkeypatch):
    monkeypatch.setitem(frontier_runs.WORKLOADS, "w", WORKLOAD)
    records: dict[str, list] = {"w": []}
    while points := list(frontier_runs.wanted(records, ["w"])):
        point = points[0]
        line = {"loss": loss_law(point), **{name: getattr(point, name) for name in point.__slots__}}
        assert line not in records["w"]
        if point.method != "fixed":
            assert (point.batch_size, point.lr) == (16, 0.2)
        records["w"].append(line)
    knee, rates = frontier_runs.knee_of(records["w"], WORKLOAD)
    assert knee == 16
    assert rates == pytest.approx({4: 0.05, 8: 0.1, 16: 0.2, 32: 0.4}, rel=0.01)
    assert len(records["w"]) == (4 * 3 + 6) + 4 + 2  # rates; the sizes on seed 1; the method


def test_a_rate_that_diverges_is_an_edge(monkeypatch):
    monkeypatch.setitem(frontier_runs.WORKLOADS, "w", WORKLOAD)
    lines = [{"method": "fixed", "batch_size": 8, "lr": lr, "seed": 0, "loss": loss} for lr, loss in ((0.1, None),)]
    tried = [WORKLOAD.rate(place) for size, place in frontier_runs.tuning(lines, WORKLOAD) if size == 8]
    assert max(tried) < 0.1


def test_a_run_is_one_line_and_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setitem(frontier_runs.WORKLOADS, "w", WORKLOAD)
    monkeypatch.setattr(frontier_runs, "get_experiment", lambda name: small(name, tmp_path))
    monkeypatch.setitem(frontier_runs.POLICIES, "anneal", frontier_runs.CANDIDATES["anneal"])
    fixed = frontier_runs.train(frontier_runs.Point("w", "fixed", 8, 0.05, 0), tmp_path, "cpu")
    grown = frontier_runs.train(frontier_runs.Point("w", "limited-1-0.5", 8, 0.05, 0), tmp_path, "cpu")
    lost = frontier_runs.train(frontier_runs.Point("w", "fixed", 8, 1e9, 0), tmp_path, "cpu")
    assert (fixed["steps"], fixed["samples"], len(fixed["course"])) == (64, 512, 4)
    assert grown["steps"] <= 64
    assert grown["sizes"][0] == [0, 8]
    assert lost["loss"] is None
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (fixed, grown)) + '{"torn')
    lines = frontier_runs.read_lines(path)
    assert lines == [fixed, grown]
    missing = list(frontier_runs.wanted({"w": lines}, ["w"]))
    assert frontier_runs.Point("w", "fixed", 8, 0.05, 0) not in missing
