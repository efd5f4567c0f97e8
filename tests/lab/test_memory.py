"""Batches that outgrow the memory: the run goes back to the size that fitted, and says so."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, micro_batches
from divebatch.errors import BatchTooLargeError
from divebatch.lab import Run, execute
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.schema import Method, Part
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from divebatch.records import read_run
from lab.compare_runs import assert_same_end
from lab.small_experiment import small

ROOM = 20
"""Samples that fit."""


class Small(nn.Module):
    """Runs out of memory above a number of samples, in the middle of a pass."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_features, 3), nn.Linear(3, 1)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x)
        if self.training and len(x) > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.seen.append(len(x))
        return self.second(middle)


@dataclass(frozen=True)
class SmallModel(ModelSettings):
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return Small(num_features)


class Doubles(Policy):
    """Twice the size after each epoch, as if the noise asked for it."""

    needs = frozenset({"diversity"})
    estimator = "per-sample"

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=2 * seen.batch_size, reason="doubled")


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """80 samples in batches of 8, 16, 32, which does not fit."""
    monkeypatch.setitem(MODELS, "small", SmallModel)
    policy = Part(kind="adabatch", settings={"max_batch_size": 64, "every_epochs": 1})
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling="linear", policy=policy, measure_always=True)
    experiment = replace(small(), model=Part(kind="small"), methods={"it": method}, schedule=Part(kind="constant"))
    return Run(experiment, "it", 0, tmp_path / "run")


def test_a_run_that_outgrows_the_memory_goes_back_says_so_and_stays_there(run, caplog):
    execute(run)
    records = read_run(run.records_path)[1]
    assert [record.batch_size for record in records] == [8, 16, 16, 16]
    assert [record.samples for record in records] == [80, 160, 240, 320]
    assert records[2].changes is not None
    assert (records[2].changes[0].batch_size, records[2].changes[0].lr) == (16, pytest.approx(0.2))
    assert [record.next_lr for record in records] == pytest.approx([0.2, 0.4, 0.2, 0.2])
    assert "at most 16: larger batches did not fit into memory" in records[2].reason
    assert "at most 16" in records[3].reason
    assert caplog.text.count("out of memory: a batch of 32 samples does not fit, 16 did") == 1
    # One step of 32 in two passes, then three of 16: 80 samples.
    assert records[2].steps - records[1].steps == 4
    assert records[2].diversity is None
    assert records[3].diversity is not None


def test_every_sample_still_comes_once_an_epoch(run, monkeypatch):
    samples: list[float] = []
    backward = torch.Tensor.backward
    forward = Small.forward

    def noted(self: Small, x: Tensor) -> Tensor:
        out = forward(self, x)
        if self.training:
            samples.extend(x[:, 0].tolist())
        return out

    monkeypatch.setattr(Small, "forward", noted)
    execute(replace(run, experiment=replace(run.experiment, epochs=3)))
    assert torch.Tensor.backward is backward
    assert sorted(samples[:80]) == sorted(samples[160:240])
    assert len(samples) == 240


def test_the_limit_survives_a_resume(run, tmp_path):
    whole = replace(run, folder=tmp_path / "whole")
    execute(whole)

    def stop(record: Any) -> None:
        if record.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(run, on_epoch=stop)
    execute(run, resume=True)
    assert_same_end(run, whole)


def test_a_first_batch_that_does_not_fit_is_an_error_with_advice(run):
    method = replace(run.experiment.methods["it"], batch_size=32)
    broken = replace(run, experiment=replace(run.experiment, methods={"it": method}))
    with pytest.raises(BatchTooLargeError, match=r"in micro-batches of 32\. Try micro_batch_size=16"):
        execute(broken)


def test_a_loop_of_one_s_own_goes_back_with_one_call():
    """The pattern of docs/training.md."""
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(80)]
    model = Small(4)
    optimizer = SGD(model.parameters(), lr=0.01)
    loader = AdaptiveLoader(data, batch_size=8, seed=0)
    sizes, fitting, records = [], 0, []
    with Controller(model, optimizer, loader, Doubles(), lr_coupling="linear") as control:
        for _ in range(4):
            for batch in loader:
                try:
                    optimizer.zero_grad()
                    mse_loss(model(batch[0]), batch[1]).backward()
                    fitting = max(fitting, len(batch[0]))
                except torch.OutOfMemoryError:
                    control.limit_batch_size(fitting)
                    optimizer.zero_grad()
                    for (x, y), weight in micro_batches(batch, fitting):
                        (mse_loss(model(x), y) * weight).backward()
                sizes.append(len(batch[0]))
                optimizer.step()
            records.append(control.step())
    assert sizes == [8] * 10 + [16] * 5 + [32] + [16] * 3 + [16] * 5
    assert [record.batch_size for record in records] == [8, 16, 16, 16]
    assert records[-1].next_lr == pytest.approx(0.02)
    assert "did not fit into memory" in records[2].reason
