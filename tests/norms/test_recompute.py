"""Layers that run again in their rule: what they find, and how they live with the rest of a meter."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.errors import CoverageError, UsageError
from divebatch.norms.registry import RULES, Entry
from divebatch.norms.rules.rerun import Rerun, Surroundings, results
from reference.per_sample import mean_loss, sq_norms

WIDTH = 4


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TiedOutputs(nn.Module):
    """Two attention layers with one output projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.MultiheadAttention(WIDTH, 2, batch_first=True).double() for _ in range(2))
        self.second.out_proj = self.first.out_proj

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return x + self.second(x, x, x)[0]


class TiedInputs(nn.Module):
    """A Linear layer with the matrix that makes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attends = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH).double()
        self.layer.weight = self.attends.in_proj_weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh().unflatten(2, (3, WIDTH)).sum(2)
        return self.attends(x, x, x)[0]


class Halves(nn.Module):
    """Both of its results come from one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(some(2, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, None] * self.gain).unbind(1)


def halves(layer: nn.Module, run: Rerun, dy: Tensor) -> dict[str, Tensor]:
    gain = torch.zeros(len(dy), 2, WIDTH).double()
    gain[:, run.output] = dy * run.arguments["x"]
    return {"gain": gain}


class Reader(nn.Module):
    """A recurrent layer and attention between ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.reads, self.attends = nn.GRU(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, state = self.reads(self.first(x).transpose(0, 1))
        return self.last(self.attends(state, steps, steps)[0][0])


# What a second run finds


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_autocast_is_as_it_was(dtype: torch.dtype | None):
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        found = Surroundings.of(nn.GRU(2, 3))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None), found.restored():
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        assert dtype is None or torch.get_autocast_dtype("cpu") == dtype
        assert torch.is_grad_enabled()


def test_random_numbers_are_as_they_were_and_are_left_alone():
    found = Surroundings.of(nn.MultiheadAttention(2, 1, dropout=0.5))
    drawn = torch.rand(3)
    before = torch.get_rng_state()
    with torch.no_grad(), found.restored():
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "layer", [nn.MultiheadAttention(2, 1), nn.MultiheadAttention(2, 1, dropout=0.5).eval(), nn.LSTMCell(2, 1)]
)
def test_a_layer_that_draws_nothing_costs_no_random_state(layer: nn.Module):
    assert Surroundings.of(layer).random_state is None


def test_results_are_what_a_loss_may_use():
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in results((first, (second, torch.tensor([1, 2])), None, third))] == [1, 2, 3]


# Beside other layers


def test_a_model_of_everything():
    model, x, targets = Reader().double(), some(5, 6, 3), some(5, 2)
    with NormMeter(model) as meter:
        mean_loss(model(x), targets).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, x, targets), rtol=1e-10, atol=0)


@pytest.mark.parametrize("tied", [TiedInputs, TiedOutputs])
def test_tied_projections_add_up(tied: type[nn.Module]):
    model, x, targets = tied(), some(5, 6, WIDTH), some(5, 6, WIDTH, seed=2)
    with NormMeter(model) as meter:
        mean_loss(model(x), targets).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, x, targets), rtol=1e-10, atol=0)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_results_of_one_node_of_which_a_loss_uses_some(used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, Halves, Entry(halves, ("gain",), all_inputs=True, reruns=True))
    layer, x = Halves(), some(5, WIDTH)
    with NormMeter(layer, loss_reduction="sum") as meter:
        both = layer(x)
        sum(both[i].sum() for i in used).backward()
    torch.testing.assert_close(meter.per_sample(), len(used) * x.square().sum(1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("trained", ["attends.out_proj", "attends", "reads", ""])
def test_the_passes_one_wants(trained: str):
    model, data = Reader().double(), [(some(5, 6, 3, seed=i), some(5, 2, seed=9 + i)) for i in range(5)]
    model.requires_grad_(False).get_submodule(trained).requires_grad_(True)
    meter = NormMeter(model)
    for number, (x, targets) in enumerate(data):
        with nullcontext() if number % 2 else meter:
            mean_loss(model(x), targets).backward()
    measured = [float(sq_norms(model, mean_loss, *batch).sum()) for batch in data[::2]]
    assert meter.sum_of_sq_norms() == pytest.approx(sum(measured), rel=1e-10)
    assert meter.num_samples == 15


def test_nothing_is_left_attached():
    model = Reader()
    with NormMeter(model):
        assert [len(module._forward_pre_hooks) for module in (model.first, model.reads, model.attends)] == [0, 1, 1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Refused


def test_a_mode_that_changes_before_the_backward_pass_gets_an_error():
    model = Reader().double()
    with NormMeter(model):
        late = model(some(5, 6, 3)).sum()
        model.eval()
        with pytest.raises(UsageError, match="a MultiheadAttention changed its mode"):
            late.backward()


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_a_compiled_meter_refuses(kind: type[nn.Module]):
    with pytest.raises(CoverageError, match=rf"compiled meter .*'0' \({kind.__name__}\)"):
        NormMeter(nn.Sequential(kind(4, 2)), compiled=True)
