"""Runs whose batch sizes are all compiled before the first epoch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import divebatch.lab.training.step as step_module
from divebatch.errors import ArgumentError
from divebatch.lab.experiments import Run, execute, make_trainer
from divebatch.lab.experiments.schema import Experiment, Part
from lab.experiments.compare_runs import records, weights
from lab.experiments.small_experiment import small

DOUBLING = Part(kind="adabatch", settings={"max_batch_size": 64, "every_epochs": 1})


@pytest.fixture
def compiled_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of each pass that is compiled, as it comes."""
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(max(each.shape[0] for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 2))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step_module.loss_of, backend=backend, dynamic=False)
    monkeypatch.setattr(step_module, "compiled_loss_of", lambda **_: compiled)
    return found


def compiled_run(folder: Path, **settings: Any) -> Run:
    experiment = small().with_training(compile=True, micro_batch_size=settings.pop("micro_batch_size", None))
    return Run(doubling(experiment), "sgd-small", 0, folder, **settings)


def doubling(experiment: Experiment) -> Experiment:
    method = replace(experiment.methods["sgd-small"], policy=DOUBLING, batch_size=8)
    return replace(experiment, methods={**experiment.methods, "sgd-small": method})


def test_a_warmed_run_ends_in_the_same_bits_and_compiles_nothing_later(tmp_path, compiled_sizes):
    cold, warm = compiled_run(tmp_path / "cold"), compiled_run(tmp_path / "warm", warm_shapes=True)
    execute(cold)
    assert compiled_sizes == [8, 16, 32, 64]
    torch._dynamo.reset()
    compiled_sizes.clear()
    seen: list[int] = []
    execute(warm, on_epoch=lambda _: seen.append(len(compiled_sizes)))
    assert seen == [4, 4, 4, 4]
    assert all(map(torch.equal, weights(warm), weights(cold)))
    first, *_, last = records(warm)
    assert (first["recompiles"], last["recompiles"]) == (4, 4)
    plain = [{**line, "recompiles": None} for line in records(cold)]
    assert [{**line, "recompiles": None} for line in records(warm)] == plain


def test_micro_batches_have_one_shape(tmp_path, compiled_sizes):
    trainer = make_trainer(compiled_run(tmp_path, micro_batch_size=16))
    assert [shape.batch_size for shape in trainer.warm_shapes().shapes] == [8, 16]
    trainer.run_epoch()
    assert compiled_sizes == [8, 16]


def test_a_run_that_compiles_nothing_cannot_be_warmed(tmp_path):
    with pytest.raises(ArgumentError, match="compiles nothing: add compile=True"):
        Run(small(), "sgd-small", 0, tmp_path, warm_shapes=True)
    with pytest.raises(ArgumentError, match="nothing is compiled here: use compile=True"):
        make_trainer(Run(small(), "sgd-small", 0, tmp_path)).warm_shapes()
