"""Recurrent layers and others that run again in their rule."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from divebatch import NormMeter
from divebatch.errors import CoverageError, UsageError
from divebatch.norms.registry import RULES, Entry
from divebatch.norms.rules.rerun import Rerun, Surroundings, results
from reference import rules
from reference.per_sample import Calls, mean_loss, sq_norms, trainable
from reference.rules import metered, some

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

SAMPLES, STEPS, INPUTS, HIDDEN = 3, 4, 2, 5
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "RNN, tanh": nn.RNN,
    "RNN, relu": lambda *sizes, **more: nn.RNN(*sizes, nonlinearity="relu", **more),
    "LSTM": nn.LSTM,
    "LSTM with projection": lambda *sizes, **more: nn.LSTM(*sizes, proj_size=3, **more),
    "GRU": nn.GRU,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True, "batch_first": True},
    "all of it": {"num_layers": 3, "bidirectional": True, "bias": False, "batch_first": True},
}
USED = {"output": (0,), "last state": (1,), "output and last state": (0, 1), "all": (0, 1, 2)}
"""Which results are in the loss; the third is an LSTM's cell state."""


class Recurring(nn.Module):
    """A recurrent layer on samples (B, T, I); its output: the results in the loss, flat. `starts`: initial states."""

    def __init__(self, make: Callable[..., Any], used: tuple[int, ...] = (0, 1, 2), **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.used = make(INPUTS, HIDDEN, **settings).double(), used
        self.starts: list[Tensor] = []

    def start_anywhere(self) -> "Recurring":
        """Begin with given states instead of zeros."""
        count = self.layer.num_layers * (1 + self.layer.bidirectional)
        widths = [self.layer.proj_size or HIDDEN, HIDDEN][: 2 if self.layer.mode == "LSTM" else 1]
        self.starts = [some(count, SAMPLES, width, seed=width) for width in widths]
        return self

    def forward(self, samples: Tensor) -> Tensor:
        x = some(SAMPLES, STEPS, INPUTS)[samples].to(self.layer.weight_ih_l0.dtype)
        hx = tuple(start[:, samples].to(x.dtype) for start in self.starts)
        given = (x if self.layer.batch_first else x.transpose(0, 1), *([hx if len(hx) > 1 else hx[0]] if hx else []))
        output, last = self.layer(*given)
        states = last if isinstance(last, tuple) else (last,)
        results = [output if self.layer.batch_first else output.transpose(0, 1), *(s.transpose(0, 1) for s in states)]
        return torch.cat([results[i].flatten(1) for i in self.used if i < len(results)], 1)


EVERYONE = torch.arange(SAMPLES)


def factors_for(model: nn.Module, x: Tensor = EVERYONE) -> Tensor:
    with torch.no_grad():
        return some(*model(x).shape, seed=5)


def assert_matches_loop(model: nn.Module, x: Tensor = EVERYONE) -> None:
    factors = factors_for(model, x)
    rules.assert_matches_loop(model, x, factors)


# Layers


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_sq_norms_match_a_loop_over_samples(kind: str, shape: str, used: str):
    assert_matches_loop(Recurring(KINDS[kind], USED[used], **SHAPES[shape]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_given_initial_states(kind: str, shape: str):
    model = Recurring(KINDS[kind], **SHAPES[shape])
    factors = factors_for(model)
    from_zero = metered(model, EVERYONE, factors)
    assert_matches_loop(model.start_anywhere())
    assert not torch.allclose(metered(model, EVERYONE, factors), from_zero, rtol=1e-3)


@settings(max_examples=40)
@given(*[st.integers(1, 4)] * 4, st.integers(1, 2), st.booleans(), st.booleans(), st.sampled_from(list(KINDS)))
def test_sq_norms_match_for_any_shape(
    samples: int, steps: int, inputs: int, hidden: int, layers: int, both_ways: bool, batch_first: bool, kind: str
):
    torch.manual_seed(0)
    sizes = {"num_layers": layers, "bidirectional": both_ways, "batch_first": batch_first}
    layer = KINDS[kind](inputs, hidden + 3, **sizes).double()
    x = some(samples, steps, inputs)

    def outputs(x: Tensor) -> Tensor:
        output = layer(x if batch_first else x.transpose(0, 1))[0]
        return output if batch_first else output.transpose(0, 1)

    with NormMeter(layer, loss_reduction="sum") as meter:
        outputs(x).square().sum().backward()
    rows = [torch.autograd.grad(outputs(x[[i]]).square().sum(), trainable(layer)) for i in range(samples)]
    expected = torch.stack([torch.cat([g.flatten() for g in row]).square().sum() for row in rows])
    torch.testing.assert_close(meter.per_sample(), expected, rtol=1e-10, atol=0)


def test_a_state_carried_from_one_call_to_the_next():
    def carry(layer: nn.LSTM, x: Tensor) -> Tensor:
        first, state = layer(x[:, :3])
        second, (_, cell) = layer(x[:, 3:], state)
        return torch.cat([first.flatten(1), second.flatten(1), cell[0]], 1)

    torch.manual_seed(0)
    layer = nn.LSTM(INPUTS, HIDDEN, batch_first=True).double()
    assert_matches_loop(Calls(layer, carry), some(SAMPLES, 5, INPUTS))


def test_a_retained_graph_runs_again():
    layer, x = nn.LSTM(INPUTS, HIDDEN).double(), some(STEPS, SAMPLES, INPUTS)
    with NormMeter(layer, loss_reduction="sum") as meter:
        output, (hidden, cell) = layer(x)
        late = output.sin().sum() + (hidden * cell).sum()
        late.backward(retain_graph=True)
        first = meter.per_sample()
        meter.reset()
        late.backward()
    torch.testing.assert_close(meter.per_sample(), first, rtol=1e-12, atol=0)


def test_a_result_without_gradient_holds_no_inputs_when_its_graph_is_gone():
    layer, x = nn.LSTM(INPUTS, HIDDEN), some(STEPS, SAMPLES, INPUTS).float()
    with NormMeter(layer) as meter:
        for _ in range(3):
            output, _ = layer(x)
            output.sum().backward()
        del output, _
        gc.collect()
        assert [len(watch.tied.open_calls) for watch in meter._engine._watches] == [0]


# Sequences of different lengths


class Packed(nn.Module):
    """Sequences (B, T, I) of these lengths, packed; the output: padded results, and the last states."""

    def __init__(self, make: Callable[..., Any], lengths: list[int], how: str = "any order", **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.lengths, self.how = make(INPUTS, HIDDEN, **settings).double(), torch.tensor(lengths), how
        self.x = some(len(lengths), max(lengths), INPUTS)

    def forward(self, samples: Tensor) -> Tensor:
        x, lengths = self.x[samples], self.lengths[samples]
        if self.how == "sorted":
            packed = pack_sequence([row[:length] for row, length in zip(x, lengths, strict=True)])
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, last = self.layer(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=self.x.shape[1])
        states = last if isinstance(last, tuple) else (last,)
        return torch.cat([padded.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


@pytest.mark.parametrize(("how", "lengths"), [("any order", [2, 4, 1, 4]), ("sorted", [4, 2, 2]), ("sorted", [3])])
@pytest.mark.parametrize("shape", ["plain", "batch first", "all of it"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, shape: str, how: str, lengths: list[int]):
    assert_matches_loop(Packed(KINDS[kind], lengths, how, **SHAPES[shape]), torch.arange(len(lengths)))


# Cells

CELLS: dict[str, Callable[..., Any]] = {
    "RNNCell, tanh": nn.RNNCell,
    "RNNCell, relu": lambda *sizes, **more: nn.RNNCell(*sizes, nonlinearity="relu", **more),
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
}


class Unrolled(nn.Module):
    """A cell called once a step; the output: all hidden states, and the last cell state."""

    def __init__(self, make: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = make(INPUTS, HIDDEN, **settings).double()

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.cat([*found, *(state[1:] if isinstance(state, tuple) else [])], 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, steps: int, bias: bool):
    assert_matches_loop(Unrolled(CELLS[kind], bias=bias), some(SAMPLES, steps, INPUTS))


# Refused


def test_dropout_between_layers_is_refused_in_train_mode_only():
    model = Recurring(nn.GRU, num_layers=2, dropout=0.1)
    with pytest.raises(CoverageError, match=r"GRU\(dropout=0.1\) .*nn\.Dropout between them"):
        metered(model, EVERYONE, factors_for(model))
    assert_matches_loop(model.eval())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_parameters_that_make_up_a_weight_are_named():
    layer = weight_norm(nn.LSTM(2, 3), "weight_hh_l0")
    with pytest.raises(CoverageError, match=r"'weight_hh_l0_g' of LSTM .*; 'weight_hh_l0_v' of LSTM \(which its rule"):
        NormMeter(layer)


# Layers that run again in their rule: what they find, and how they live with the rest of a meter


WIDTH = 4


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
