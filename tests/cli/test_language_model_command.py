"""`divebatch run lm-bytes` on a tiny corpus."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from divebatch.cli import app
from divebatch.lab.schema import FOLDER
from lab.data.text_files import write_corpus

RUN = ["run", "lm-bytes", "--model", "gpt-tiny", "--set", "training.precision=fp32", "--epochs", "4", "--jobs", "1"]


@pytest.fixture
def data(tmp_path) -> Path:
    return write_corpus(tmp_path / "data")


def run(tmp_path: Path, data: Path, *words: str):
    return CliRunner().invoke(app, [*RUN, "--data-dir", str(data), "--out", str(tmp_path / "out"), *words])


def lines(tmp_path: Path, method: str) -> list[dict]:
    path = tmp_path / "out" / "lm-bytes" / method / "seed-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_pass_is_one_command_with_bits_per_byte_and_its_report(tmp_path, data):
    answer = run(tmp_path, data, "--methods", "fixed-8,noise-doubling-8")
    assert answer.exit_code == 0, answer.output
    assert re.search(r"noise-doubling-8 seed 0: epoch 4/4  [\d.]+ bits per byte  val loss [\d.]+", answer.output)
    header, *epochs = lines(tmp_path, "noise-doubling-8")
    assert header["metric"] == {"name": "bits_per_byte", "better": "lower"}
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4]
    assert all(epoch["val_accuracy"] is None for epoch in epochs)
    report = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert report.exit_code == 0, report.output
    assert "bits per byte" in report.output


def test_samples_and_seconds_end_a_run(tmp_path, data):
    assert run(tmp_path, data, "--methods", "fixed-8", "--set", "samples=64").exit_code == 0
    assert lines(tmp_path, "fixed-8")[-1]["samples"] == 64
    file = tmp_path / "repeated.toml"
    content = (FOLDER / "lm-bytes.toml").read_text()
    file.write_text(f"seconds = 0.2\nrepeat = true\n{content}")
    words = ["--methods", "fixed-16", "--data-dir", str(data), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, ["run", str(file), *RUN[2:], *words])
    assert answer.exit_code == 0, answer.output
    assert lines(tmp_path, "fixed-16")[-1]["epoch"] == 4


def test_wrong_data_ends_the_command_with_one_message(tmp_path, data):
    missing = run(tmp_path, data, "--methods", "fixed-8", "--data-dir", "/no/such/folder")
    assert missing.exit_code == 2
    assert "'/no/such/folder' does not exist: pass --data-dir" in missing.output
    assert "--resume" not in missing.output  # nothing was begun
    path = data / "text" / "tiny.train.xz"
    path.write_bytes(path.read_bytes()[:-40])
    spoilt = run(tmp_path, data, "--methods", "fixed-8,noise-doubling-8")
    assert spoilt.exit_code == 2
    assert spoilt.output.count("tiny.train.xz' cannot be read as .xz") == 1
    assert "(the same for 1 more of the runs)" in spoilt.output


def test_a_run_that_cannot_begin_beside_one_that_can_is_a_failure(tmp_path, data):
    file = tmp_path / "mixed.toml"
    content = (FOLDER / "lm-bytes.toml").read_text()
    file.write_text(content.replace("every_steps = 32", 'every_steps = 32\nestimator = "trajectory"'))
    words = ["--methods", "fixed-8,noise-doubling-8", "--set", "samples=32"]
    words += ["--data-dir", str(data), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, ["run", str(file), *RUN[2:], *words])
    assert answer.exit_code == 1
    assert "Trajectory sums over whole epochs" in answer.output
    assert "1 of 2 runs are complete" in answer.output
    assert "--resume" in answer.output


def test_no_command_names_an_option_that_it_lacks(tmp_path, data):
    file = tmp_path / "long.toml"
    file.write_text("samples = 1000000\n" + (FOLDER / "lm-tiny.toml").read_text())
    words = ["--over", "lr=0.1", "--data-dir", str(data), "--out", str(tmp_path / "out")]
    text = " ".join(CliRunner().invoke(app, ["search", str(file), *words]).output.split())
    assert "samples=1000000" in text
    assert "--samples" not in text
    assert "--repeat" not in text
