"""RNN, LSTM, GRU and their cells, whose recurrence runs again in the rule, step by step.

Each product with a weight is a Linear layer over the steps. Shapes: B samples, T steps; a tensor of one step is
(B, 1, features).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from divebatch.errors import CoverageError
from divebatch.norms.forms import Explicit, Form, Outer
from divebatch.norms.registry import require_batch, rule_for
from divebatch.norms.rules.rerun import Rerun, gradients, product

State = tuple[Tensor, ...]
"""The hidden state of one step, and an LSTM's cell state."""
CELL_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


# One step, from its products with the input and with the hidden state


def lstm_step(by_input: Tensor, by_state: Tensor, state: State) -> State:
    """Apply input, forget and output gates to a cell state."""
    i, f, g, o = (by_input + by_state).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_step(by_input: Tensor, by_state: Tensor, state: State) -> State:
    """Apply reset and update gates. The reset gate acts only on U h, so its gradient differs from that of W x."""
    (r, z, n), (r_state, z_state, n_state) = by_input.chunk(3, -1), by_state.chunk(3, -1)
    update = (z + z_state).sigmoid()
    new = (n + (r + r_state).sigmoid() * n_state).tanh()
    return ((1 - update) * new + update * state[0],)


STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "RNN_TANH": lambda by_input, by_state, _: ((by_input + by_state).tanh(),),
    "RNN_RELU": lambda by_input, by_state, _: ((by_input + by_state).relu(),),
    "LSTM": lstm_step,
    "GRU": gru_step,
}


# Products with a weight


@dataclass(slots=True)
class Trace:
    """All products with one weight matrix: their inputs and results."""

    layer: Any
    weight: str
    bias: str = ""
    """The name of the bias; empty for none."""
    xs: list[Tensor] = field(default_factory=list)
    ys: list[Tensor] = field(default_factory=list)

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        y = product(x, getattr(self.layer, self.weight), getattr(self.layer, self.bias, None))
        self.xs.append(x.detach())
        self.ys.append(y)
        return y

    def forms(self, dys: list[Tensor]) -> dict[str, Form]:
        """Return the forms, given the gradients of the results."""
        left = torch.cat(dys, 1)
        return {self.weight: Outer(left, torch.cat(self.xs, 1)), self.bias: Explicit(left.sum(1))}


def _forms(traces: list[Trace], result: Tensor, dy: Tensor) -> dict[str, Form]:
    found = iter(gradients(result, dy, [y for trace in traces for y in trace.ys]))
    stated: dict[str, Form] = {}
    for trace in traces:
        stated |= trace.forms([next(found) for _ in trace.ys])
    return stated


# Whole layers


@rule_for(nn.RNN, parameters=lambda layer: layer._flat_weights_names, reruns=True)
@rule_for(nn.LSTM, parameters=lambda layer: layer._flat_weights_names, reruns=True)
@rule_for(nn.GRU, parameters=lambda layer: layer._flat_weights_names, reruns=True)
def recurrent(layer: Any, run: Rerun, dy: Tensor) -> dict[str, Form]:
    """Measure a layer with any number of levels and directions, also for packed sequences."""
    if layer.dropout > 0 and layer.training and layer.num_layers > 1:
        raise CoverageError(
            f"{type(layer).__name__}(dropout={layer.dropout}) cannot be measured in train mode: what it drops is not "
            f"known outside of it",
            "use layers of num_layers=1 with nn.Dropout between them",
        )
    given, hx = run.arguments["input"], run.arguments.get("hx")
    x, is_open = _batch_first(layer, given)
    with run.surroundings.restored():
        traces, results = _unrolled(layer, x, _starts(layer, hx, x), is_open)
        if run.output == 0 and isinstance(given, PackedSequence):
            dy = _padded(given._replace(data=dy))[0]
        elif run.output == 0 and not layer.batch_first:
            dy = dy.transpose(0, 1)
        return _forms(traces, results[run.output], dy)


def _batch_first(layer: Any, given: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
    """Return the input (B, T, I), and a mask (B, T, 1) of the steps if sequences differ in length."""
    if isinstance(given, PackedSequence):
        x, lengths = _padded(given)
        return x, (torch.arange(x.shape[1]) < lengths[:, None])[:, :, None].to(x.device)
    require_batch(layer, given, 3)
    return given if layer.batch_first else given.transpose(0, 1), None


def _padded(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    return pad_packed_sequence(packed, batch_first=True)


def _starts(layer: Any, hx: Tensor | State | None, x: Tensor) -> list[State]:
    """Return the state before the first step, for each layer and direction."""
    count = layer.num_layers * (1 + layer.bidirectional)
    if hx is None:
        hidden = x.new_zeros(count, len(x), layer.proj_size or layer.hidden_size)
        hx = (hidden, x.new_zeros(count, len(x), layer.hidden_size)) if layer.mode == "LSTM" else hidden
    parts = (hx,) if isinstance(hx, Tensor) else hx
    return [tuple(part[i, :, None] for part in parts) for i in range(count)]


def _unrolled(
    layer: Any, x: Tensor, starts: list[State], is_open: Tensor | None
) -> tuple[list[Trace], tuple[Tensor, ...]]:
    """Return all products, and the layer's results: the output, batch first, and the last states."""
    traces: list[Trace] = []
    lasts: list[State] = []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in ("", "_reverse")[: 1 + layer.bidirectional]:
            products, output, last = _sweep(layer, f"_l{depth}{direction}", x, starts[len(lasts)], is_open)
            outputs.append(output)
            lasts.append(last)
            traces += products
        x = torch.cat(outputs, -1)
    return traces, (x, *(torch.cat(part, 1).transpose(0, 1) for part in zip(*lasts, strict=True)))


def _sweep(
    layer: Any, suffix: str, x: Tensor, state: State, is_open: Tensor | None
) -> tuple[list[Trace], Tensor, State]:
    """Run one layer in one direction over all steps; return its products, all hidden states, and the last state."""
    traces = [Trace(layer, f"weight_{kind}{suffix}", f"bias_{kind}{suffix}") for kind in ("ih", "hh")]
    if layer.proj_size:
        traces.append(Trace(layer, f"weight_hr{suffix}"))
    by_input = traces[0].product(x).split(1, 1)
    steps = range(len(by_input))
    hiddens = {}
    for t in reversed(steps) if suffix.endswith("_reverse") else steps:
        hidden, *cell = STEPS[layer.mode](by_input[t], traces[1].product(state[0]), state)
        new = (traces[2].product(hidden) if layer.proj_size else hidden, *cell)
        if is_open is not None:  # a masked step does not change the state
            new = tuple(torch.where(is_open[:, t : t + 1], *pair) for pair in zip(new, state, strict=True))
        state, hiddens[t] = new, new[0]
    return traces, torch.cat([hiddens[t] for t in steps], 1), state


# Cells


@rule_for(nn.RNNCell, parameters=CELL_PARAMETERS, reruns=True)
@rule_for(nn.LSTMCell, parameters=CELL_PARAMETERS, reruns=True)
@rule_for(nn.GRUCell, parameters=CELL_PARAMETERS, reruns=True)
def recurrent_cell(layer: Any, run: Rerun, dy: Tensor) -> dict[str, Form]:
    """Measure one step of a cell; several calls in a pass add up, as for any layer."""
    x, hx = run.arguments["input"], run.arguments.get("hx")
    require_batch(layer, x, 2)
    mode = f"RNN_{layer.nonlinearity.upper()}" if isinstance(layer, nn.RNNCell) else type(layer).__name__[:-4].upper()
    state = (hx,) if isinstance(hx, Tensor) else hx or (x.new_zeros(len(x), layer.hidden_size),) * 2
    with run.surroundings.restored():
        by_input, by_state = (Trace(layer, f"weight_{kind}", f"bias_{kind}") for kind in ("ih", "hh"))
        start = tuple(part[:, None] for part in state)
        results = STEPS[mode](by_input.product(x[:, None]), by_state.product(start[0]), start)
        if len(results) == 2 and run.output == 0 and not x.is_cuda:
            # On a CPU, torch makes h from c: the gradient of c already includes the part through h.
            results[1].register_hook(torch.zeros_like)
        return _forms([by_input, by_state], results[run.output], dy[:, None])
