import re

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.errors import StoppedError
from divebatch.lab import get_experiment
from divebatch.lab.search import to_toml
from lab.data.text_files import write_corpus
from lab.helpers import tiny_experiment


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(tiny_experiment()), encoding="utf-8")
    return path


def call(*words):
    return CliRunner().invoke(app, ["search", *map(str, words)])


def test_a_search_ends_with_a_table_a_picture_and_a_file_to_run(experiment, tmp_path):
    out = tmp_path / "out"
    words = (experiment, "--over", "lr=0.001,1", "--over", "batch_size=16", "--epochs", "2", "--out", out)
    answer = call(*words)
    assert answer.exit_code == 0, answer.output
    assert len(re.findall(r"^\[\d/2\] lr", answer.output, re.MULTILINE)) == 2
    assert "\x1b" not in answer.output
    name = "synthetic-convex-sgd-small"
    assert f"{name}: 2 of 2 trials" in answer.output
    assert {path.suffix for path in out.iterdir() if path.is_file()} == {".json", ".toml", ".png", ".svg"}
    found = get_experiment(str(out / f"{name}.toml")).method("sgd-small")
    assert found.lr == 1
    assert f"next: divebatch run {out / name}.toml --methods sgd-small" in answer.output
    again = call(*words, "--results")
    assert again.exit_code == 0
    assert "[" not in again.output
    assert "2 of 2 trials" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "sgd-tiny"], "unknown method 'sgd-tiny'"),
        (["--over", "delta=1"], "nothing to search over called 'delta'"),
        (["--over", "lr=1..2"], "a grid needs values, not a range"),
        (["--sampler", "dice"], "unknown sampler 'dice'"),
        (["--held-out", "1.5"], "held_out must lie between 0 and 1"),
        (["--apply-to", "sgd-tiny"], "unknown method 'sgd-tiny'"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(experiment, tmp_path, words, message):
    answer = call(experiment, "--out", tmp_path / "out", *words)
    assert answer.exit_code == 2, answer.output
    assert message in answer.output


def test_a_stopped_search_says_how_to_go_on(experiment, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise StoppedError("stopped after 2 epochs")

    monkeypatch.setattr("divebatch.lab.search.work", stop)
    monkeypatch.setattr("sys.argv", ["divebatch", "search", "tiny.toml"])
    answer = call(experiment, "--out", tmp_path)
    assert answer.exit_code == 1
    assert "the same command continues the search:\n  divebatch search tiny.toml" in answer.output


def test_another_search_under_the_same_name_is_refused(experiment, tmp_path):
    words = (experiment, "--over", "lr=1", "--over", "batch_size=16", "--out", tmp_path, "--quiet")
    assert call(*words, "--epochs", "1").exit_code == 0
    answer = call(*words, "--epochs", "2")
    assert answer.exit_code == 2
    assert "Choose another name for the study" in answer.output


def test_by_default_the_first_baseline_is_searched(tmp_path):
    """A language model has no method `sgd-small`."""
    experiment = get_experiment("lm-bytes", ["model.kind=gpt-tiny"])
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")
    data = write_corpus(tmp_path / "data", train=60)
    out = tmp_path / "out"
    answer = call(path, "--data-dir", data, "--epochs", "1", "--over", "lr=0.001,0.002", "--out", out)
    assert answer.exit_code == 0, answer.output
    assert "lm-bytes-fixed-16: 2 of 2 trials" in answer.output
    assert "bits per byte" in answer.output
