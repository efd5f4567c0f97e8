import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.lab.schema import FOLDER
from lab.data.text_files import write_corpus
from lab.helpers import probed_experiment

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
    words = ("--steps", 60, "--batch-sizes", "16,64,256", "--set", "methods.sgd-small.lr=0.25", "--out", out)
    answer = call(probed_experiment(tmp_path), *words)
    assert answer.exit_code == 0, answer.output
    assert "Noise scale:" in answer.output
    timed = [line.split(":")[0] for line in answer.stderr.splitlines()]
    assert timed == ["batch 16", "batch 64", "batch 256"]
    assert "over steps 31 to 60 at batch 16" in answer.output
    assert "Growth stops paying at batch" in answer.output
    assert sorted(path.name for path in out.iterdir()) == ["tiny.json", "tiny.png", "tiny.svg"]
    found = json.loads((out / "tiny.json").read_text())
    assert [each["batch_size"] for each in found["step_seconds"]] == [16, 64, 256]
    assert found["reference_lr"] == 0.25


def test_a_function_of_ones_own_by_its_import_path(own):
    words = ("--batch-size", 16, "--steps", 100, "--batch-sizes", "16,64", "--json")
    answer = call("my_training_code:parts", *words)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["target"] == "my_training_code:parts"
    assert found["reference_lr"] == 0.01
    assert (own / "runs" / "advice" / "my_training_code-parts.svg").exists()


def test_one_pass_of_a_language_model_whose_end_is_beyond_its_data(tmp_path):
    file = tmp_path / "long.toml"
    file.write_text(
        (FOLDER / "lm-bytes.toml").read_text().replace("one_pass = true", "one_pass = true\nsamples = 1_000_000")
    )
    data = write_corpus(tmp_path / "data", train=60)
    words = ("--set", "model.kind=gpt-tiny", "--data-dir", data, "--steps", 24, "--batch-sizes", "8,16")
    answer = call(file, *words, "--json", "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["reference_batch_size"] == 16  # the experiment's baseline
    assert found["lr_coupling"] == "sqrt"
    assert found["dataset_size"] == 212  # one pass


def test_out_of_memory_names_options_that_the_command_has(own, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Linear, "forward", too_large)
    answer = call("my_training_code:parts", "--batch-size", 16)
    assert answer.exit_code == 2
    assert "--batch-size" in answer.stderr
    assert "micro" not in answer.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my_training_code:nothing"], "cannot import 'my_training_code:nothing'"),
        (["my_training_code:few"], "or (model, loss_fn, dataset, optimizer), got 2 objects"),
        (["my_training_code:COUNT"], "must be a function that returns (model, loss_fn, dataset)"),
        (["synthetic-convex", "--set", "methods.sgd-small.lr=0.0"], "lr: must be greater than 0, got 0.0"),
        (["my_training_code:parts", "--set", "lr=1"], "--set lr: no experiment file is used here, so only training"),
        (["synthetic-convex", "--method", "sgd-tiny"], "unknown method 'sgd-tiny'"),
        (["synthetic-convex", "--batch-sizes", "8,x"], "--batch-sizes must be whole numbers"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(own, words, message):
    answer = call(*words)
    assert answer.exit_code == 2, answer.output
    assert message in answer.output
