"""The benchmark that puts all estimators beside the oracle."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim import SGD

from divebatch.estimators import Oracle, TrainingContext
from divebatch.measurement import Diversity
from reference.delivery import Delivered
from reference.per_sample import dataset, diversity, gradients, mean_loss, mlp, pair_of

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "estimator_traces.py"
DATA = dataset(12)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("estimator_traces", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches():
    return iter([DATA[:6], DATA[6:]])


def test_halves_at_rest_are_compared_batch_by_batch_and_told_beside_the_oracle(script):
    model = mlp()
    together = script.Together({"split at rest": script.AtRest(mean_loss), "oracle": Oracle(mean_loss)})
    together.bind(TrainingContext(model, Delivered(lambda: 12, batches), SGD(model.parameters(), 0.1)))
    together.start()
    first = together.finish()
    together.close()
    assert first is together.told["split at rest"]
    halves = [gradients(model, mean_loss, x, y).split(3) for x, y in batches()]
    pairs = torch.tensor([pair_of(list(each)) for each in halves])
    assert (first.trace, first.sq_norm) == pytest.approx(tuple(pairs.mean(0).tolist()), rel=1e-6)
    exact = diversity(mlp(), mean_loss, [DATA.tensors])
    assert together.told["oracle"].value == pytest.approx(exact.value, rel=1e-8)


def test_what_is_infinite_or_not_known_is_null(script):
    told = {each: [*map(script.finite, script.numbers(Diversity.from_noise(3.0, each, 12)))] for each in (0.1, -0.1)}
    assert told == {0.1: pytest.approx([30.0] * 3), -0.1: [None, 0.0, None]}


def test_traces_are_read_by_estimator_and_epoch_and_drawn(script, tmp_path):
    pytest.importorskip("matplotlib")
    told = [
        {"seed": seed, "epoch": epoch, "estimator": "split", "noise_scale": 100.0 * epoch + seed if epoch < 3 else None}
        for seed in range(2)
        for epoch in (1, 2, 3)
    ]
    out = tmp_path / "traces.jsonl"
    out.write_text("\n".join(map(json.dumps, [{"torch": "2"}, *told])))
    assert script.traces(out) == {"split": {1: [100.0, 101.0], 2: [200.0, 201.0]}}
    script.draw(out, tmp_path / "traces.png")
    assert (tmp_path / "traces.png").stat().st_size > 1000
