"""The seeds that compiled passes hand to the GPU kernels which draw random signs."""

import pytest
import torch
from torch import nn

from divebatch import NormMeter
from divebatch.norms.compiled import CompiledEngine
from reference.per_sample import mean_loss, mlp, samples


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here are compiled passes."""
    monkeypatch.setattr(CompiledEngine, "looks_first", False)


def make_meter(mode: str) -> tuple[nn.Module, NormMeter]:
    model = mlp()
    return model, NormMeter(model, compiled=True, mode=mode)


def test_each_pass_has_other_seeds_and_a_pass_that_waits_is_not_disturbed():
    model, meter = make_meter("sketch")
    x, y = samples(4)
    seeds = meter._engine.seeds
    assert len(seeds) == len(meter._layers)
    seen = [seeds.clone()]
    with meter:
        losses = [mean_loss(model(x), y) for _ in range(2)]
        for loss in losses:
            loss.backward()  # torch refuses if what it saved for this pass was changed in sight
            seen.append(seeds.clone())
    assert meter._engine.seeds is seeds  # a recorded pass reads them at this place
    assert len({tuple(each.tolist()) for each in seen}) == 3
    assert len(set(seen[0].tolist())) == len(seen[0])


def test_exact_passes_leave_the_seeds_alone():
    model, meter = make_meter("exact")
    x, y = samples(4)
    before = meter._engine.seeds.clone()
    with meter:
        mean_loss(model(x), y).backward()
    assert torch.equal(meter._engine.seeds, before)
