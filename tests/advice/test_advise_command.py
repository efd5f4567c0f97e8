import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from divebatch import Advice
from divebatch.advice.noise import NoiseCourse, NoiseEstimate
from divebatch.advice.tradeoff import StepTimes
from divebatch.cli import app
from divebatch.cli.work.advise import command_for
from divebatch.lab.experiments import Run, get_experiment
from divebatch.lab.experiments.schema import FOLDER
from lab.experiments.dataset_tests.text_files import write_corpus
from lab.probe.tiny_run import tiny_experiment

OWN = """
import torch
from torch.utils.data import TensorDataset

def parts():
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(x, x.sum(1, keepdim=True) + 3 * torch.randn(512, 1))
    return model, torch.nn.functional.mse_loss, data, torch.optim.SGD(model.parameters(), lr=0.01)

def few():
    return parts()[:2]

def turned():
    return parts()[2::-1]

COUNT = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_training_code.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_training_code", raising=False)
    return tmp_path


def call(*words):
    return CliRunner().invoke(app, ["advise", *map(str, words)])


def test_an_experiment_gets_words_a_file_and_a_picture(tmp_path):
    out = tmp_path / "out"
    words = ("--steps", 60, "--batch-sizes", "16,64,256", "--out", out)
    answer = call(tiny_experiment(tmp_path), *words)
    assert answer.exit_code == 0, answer.output
    assert "Noise scale:" in answer.output
    timed = [line.split(":")[0] for line in answer.stderr.splitlines()]
    assert timed == ["batch 16", "batch 64", "batch 256"]
    assert "over steps 31 to 60 at batch 16" in answer.output
    assert "Growth stops paying at batch" in answer.output
    assert sorted(path.name for path in out.iterdir()) == ["tiny.json", "tiny.png", "tiny.svg"]
    found = json.loads((out / "tiny.json").read_text())
    assert [each["batch_size"] for each in found["step_seconds"]] == [16, 64, 256]
    assert found["reference_lr"] == 0.1


def test_batch_size_and_rate_can_be_ones_own(tmp_path):
    words = ("--steps", 24, "--batch-sizes", "8,16", "--batch-size", 8, "--lr", 0.25, "--json", "--out", tmp_path)
    found = json.loads(call(tiny_experiment(tmp_path), *words).stdout)
    assert (found["reference_batch_size"], found["reference_lr"]) == (8, 0.25)


def test_a_function_of_ones_own_by_its_import_path(own):
    words = ("--batch-size", 16, "--steps", 100, "--batch-sizes", "16,64", "--seconds", 3, "--json")
    answer = call("my_training_code:parts", *words)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["target"] == "my_training_code:parts"
    assert found["reference_lr"] == 0.01
    assert found["deadline"]["samples"] is None  # as many epochs as the time is enough for
    assert found["deadline"]["command"] == ""
    assert (own / "runs" / "advice" / "my_training_code-parts.svg").exists()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="older torch")
def test_a_language_model_with_two_optimizers_gets_a_deadline(tmp_path):
    file = tmp_path / "muon.toml"
    file.write_text((FOLDER / "lm-bytes.toml").read_text().replace('"adamw"', '"muon"'))
    data = write_corpus(tmp_path / "data", train=60)
    words = ("--model", "gpt-tiny", "--data-dir", data, "--steps", 24, "--batch-sizes", "8,16", "--seconds", 999)
    answer = call(file, *words, "--json", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["reference_batch_size"] == 16  # the experiment's baseline
    assert found["lr_coupling"] == "sqrt"
    assert found["deadline"]["samples"] == 212  # one pass
    assert [reach["steps"] for reach in found["deadline"]["reaches"]] == [26, 13]


COMMANDS = {
    "one pass": ("lm-bytes", 32, {"samples": 5000}, "--seconds 60 --methods fixed-32,auto-32"),
    "again and again": ("lm-bytes", 8, {}, "--seconds 60 --repeat --methods fixed-8,auto-8"),
    "epochs": ("cifar10", 128, {}, "--epochs 3 --methods sgd-small"),
    "no such batch": ("lm-bytes", 48, {}, "No method of lm-bytes has batch 48: give one batch_size = 48 and lr = 0.1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_trains_the_best_batch_for_the_time(name):
    target, size, most, expected = COMMANDS[name]
    now = NoiseEstimate(1, 100, 0.0, 0.0, 0.0)
    times = StepTimes(((size, 0.02), (size + 1, 9.0)))
    dataset_size = size * 1000  # 3000 steps in 60 s
    advice = Advice(
        noise=NoiseCourse((now,), now),
        times=times,
        reference_batch_size=size,
        reference_lr=0.1,
        adaptive=True,
        dataset_size=dataset_size,
    )
    run = Run(get_experiment(target), "", 0, Path("out"), data_dir=Path("data"))
    found = command_for(run, advice.for_deadline(60.0, **most), target, ["--precision", "fp32"])
    assert expected in found
    if "No method" not in expected:
        assert found.startswith(f"divebatch run {target} --precision fp32 --data-dir data --device cpu --")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthetic-convex", "--seconds", "0"], "--seconds must be positive and finite, got 0.0"),
        (["synthetic-convex", "--seconds", "-3"], "--seconds must be positive and finite, got -3.0"),
        (["synthetic-convex", "--seconds", "nan"], "--seconds must be positive and finite, got nan"),
        (["synthetic-convex", "--repeat"], "--repeat says how --seconds are filled"),
        (
            ["my_training_code:parts", "--batch-size", "16", "--batch-sizes", "16,32", "--seconds", "1e-7"],
            "--seconds 1e-07 are too few: the fastest step, of batch",
        ),
        (["my_training_code:nothing"], "cannot import 'my_training_code:nothing'"),
        (["no_such_module:parts"], "cannot import 'no_such_module:parts'"),
        (["my_training_code:few"], "or (model, loss_fn, dataset, optimizer), got 2 objects"),
        (["my_training_code:parts"], "batch_size is missing"),
        (["my_training_code:parts", "--batch-size", "600"], "batch_size=600 is more than the 512 samples there are"),
        (["my_training_code:COUNT"], "must be a function that returns (model, loss_fn, dataset)"),
        (["my_training_code:turned"], "model must be a torch.nn.Module, got TensorDataset"),
        (["synthetic-convex", "--lr", "0"], "--lr must be positive and finite, got 0.0"),
        (["synthetic-convex", "--lr", "-1"], "--lr must be positive and finite, got -1.0"),
        (["my_training_code:parts", "--lr", "1"], "--lr is for experiments"),
        (["cifar-11"], "unknown experiment 'cifar-11'"),
        (["synthetic-convex", "--method", "sgd-tiny"], "has no method 'sgd-tiny'"),
        (["synthetic-convex", "--batch-sizes", "8,x"], "--batch-sizes must be whole numbers"),
        (["synthetic-convex", "--steps", "5"], "steps must be at least 24"),
        (["synthetic-convex", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(own, words, message):
    answer = call(*words)
    assert answer.exit_code == 2, answer.output
    assert message in answer.output
