"""The experiments that ask whether it pays run on a CPU at a tiny size, from data in the format of the real ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from divebatch.lab import Run, execute, get_experiment
from divebatch.lab.schema import Part
from divebatch.records import read_run
from lab.data.image_files import write_cifar100
from lab.data.text_files import write_corpus

TINY_GPT = Part(kind="gpt-tiny", settings={"layers": 1, "width": 16, "heads": 2, "sequence_length": 16})


@pytest.mark.parametrize("method", ["sgd-small", "auto-256"])
def test_cifar100_runs(tmp_path: Path, method: str) -> None:
    write_cifar100(tmp_path)
    experiment = replace(get_experiment("policies-cifar100").scaled(1), model=Part(kind="resnet20"))
    run = Run(experiment, method, 0, tmp_path / "out", data_dir=tmp_path)
    execute(run)
    assert read_run(run.records_path)[1][-1].epoch == 1


def test_a_language_model_ends_after_its_seconds(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    experiment = replace(get_experiment("lm-124m"), model=TINY_GPT).with_training(precision="fp32")
    assert (experiment.seconds, experiment.repeat) == (300.0, True)
    run = Run(experiment.scaled(4).ending(seconds=0.2), "auto-16", 0, tmp_path / "out", data_dir=tmp_path)
    execute(run)
    _, epochs = read_run(run.records_path)
    assert epochs[-1].epoch == 4
    assert epochs[-1].bits_per_byte is not None
