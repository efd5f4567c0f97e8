"""The benchmark that runs a workload in pieces."""

import importlib.util
import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from divebatch.errors import ArgumentError, DivergedError
from divebatch.report import load_runs
from lab.data.text_files import write_corpus

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "when_it_pays.py"
TIMES = ("seconds", "memory")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("when_it_pays", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ticks:
    """A clock that goes on by one second whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def words(tmp_path: Path, out: str, *more: str) -> list[str]:
    write_corpus(tmp_path / "data", train=20)
    places = ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / out), "--device", "cpu"]
    tiny = ["--model", "gpt-tiny", "--epochs", "2", "--samples", "48", "--trials", "1"]
    return ["lm-bytes", *places, *tiny, "--methods", "fixed-8,noise-doubling-8", *more]


def records(folder: Path) -> dict[str, list[dict]]:
    """Without what depends on the machine."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(folder))] = [
            {key: value for key, value in line.items() if not any(word in key for word in TIMES)} for line in lines[1:]
        ]
    return found


def test_pieces_go_on_where_they_stopped_and_end_as_one_would(script, tmp_path, capsys):
    # Six steps a run, and the clock is looked at after each: the budget ends in the middle of runs.
    pieces = 1
    while script.main(words(tmp_path, "pieces", "--budget-seconds", "5"), clock=Ticks()) != 0:
        pieces += 1
        assert pieces < 10
    assert pieces >= 3
    assert script.main(words(tmp_path, "whole", "--budget-seconds", "1e9")) == 0
    assert len(records(tmp_path / "pieces")) == 2
    assert records(tmp_path / "pieces") == records(tmp_path / "whole")
    said = capsys.readouterr().out
    assert "0 of 2 runs are done" in said
    assert "the same command again continues" in said
    assert said.count("noise-doubling-8, seed 0: ") == 2


def test_the_archive_has_the_records_alone_and_a_report_can_be_made_of_it(script, tmp_path):
    assert script.main(words(tmp_path, "out", "--budget-seconds", "1e9")) == 0
    archive = tmp_path / "out" / "lm-bytes.tar.xz"
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["lm-bytes/fixed-8/seed-0.jsonl", "lm-bytes/noise-doubling-8/seed-0.jsonl"]
        tar.extractall(tmp_path / "unpacked", filter="data")
    (experiment,) = load_runs(tmp_path / "unpacked").experiments
    assert set(experiment.methods) == {"noise-doubling-8", "fixed-8"}
    assert not list((tmp_path / "out").rglob("*.ckpt*"))
    before = archive.read_bytes()
    assert script.main(words(tmp_path, "out", "--budget-seconds", "1e9")) == 0
    assert archive.read_bytes() == before


def test_seeds_come_one_after_the_other(script, tmp_path):
    options = script.argparse.Namespace(
        **{"experiment": "policies-cifar10", "methods": None, "trials": 2, "epochs": 4, "samples": None, "model": None},
        **{"device": "cpu", "out": tmp_path, "data_dir": tmp_path},
    )
    runs = script.planned(options)
    assert [run.seed for run in runs] == [0] * 11 + [1] * 11
    assert [run.method_name for run in runs[:3]] == ["sgd-small", "sgd-256", "sgd-tuned"]
    options.methods = "sgd-huge"
    with pytest.raises(ArgumentError, match="unknown method 'sgd-huge'"):
        script.planned(options)


def test_a_run_that_diverged_is_not_tried_again(script, tmp_path, monkeypatch):
    tried = []

    def diverge(run, **_):
        tried.append(run.method_name)
        run.records_path.parent.mkdir(parents=True, exist_ok=True)
        raise DivergedError("the loss is not finite")

    monkeypatch.setattr(script, "execute", diverge)
    for _ in range(2):
        assert script.main(words(tmp_path, "out")) == 0
    assert tried == ["fixed-8", "noise-doubling-8"]
    with tarfile.open(tmp_path / "out" / "lm-bytes.tar.xz") as tar:
        assert "lm-bytes/noise-doubling-8/seed-0.diverged" in tar.getnames()
