"""Random rounding of gradients to a few levels (QSGD), which saves bits and adds noise that raises the diversity."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from divebatch.checks import require_count
from divebatch.data.order import checked_seed, mixed_seed
from divebatch.errors import ArgumentError, CheckpointError, UsageError

DRAWS = 0x51534744
"""A number that separates these draws from others with the same seed."""
NUMBER_BITS = 32
"""Bits of a norm or of a count of entries."""


class Rounded(NamedTuple):
    """A randomly rounded vector."""

    value: Tensor
    variance: Tensor
    """The exact E||value - vector||^2 over the draws, in float64."""
    nonzeros: Tensor
    """Number of nonzero entries of `value`."""


def rounded(vector: Tensor, levels: int, draws: Tensor) -> Rounded:
    """Round each entry of a vector to one of the two neighbouring multiples of ||vector|| / levels.

    With a = levels * |v_j| / ||v|| and p = a - floor(a), an entry goes to the upper neighbour if its draw is below p.
    The mean is then v, and the variance ||v||^2 / levels^2 * sum_j p_j (1 - p_j).

    Args:
        vector: A tensor of any shape.
        levels: Number of levels above zero.
        draws: Uniform draws in [0, 1), one for each entry.
    """
    exact = vector.detach().to(torch.promote_types(vector.dtype, torch.float32))
    norm = torch.linalg.vector_norm(exact, dtype=torch.float64)  # squares of small gradients would vanish in float32
    unit = norm.clamp_min(torch.finfo(exact.dtype).tiny).to(exact.dtype)
    place = (exact.abs() / unit * levels).clamp_max(levels)
    below = place.floor()
    chance = place - below
    level = below + (draws < chance)
    value = exact.sign() * level * (norm / levels).to(exact.dtype)
    variance = (chance * (1 - chance)).sum(dtype=torch.float64) * (norm / levels) ** 2
    return Rounded(value.to(vector.dtype), variance, level.count_nonzero())


def bits_to_send(entries: int, nonzeros: Tensor, levels: int) -> Tensor:
    """Count the bits of a rounded vector: its norm, one bit to name a form, and the shorter of two forms.

    One form has the signed level of each entry, in ceil(log2(2 * levels + 1)) bits. The other form has the number of
    nonzero entries, and the place, sign and level of each.
    """
    of_all = entries * (2 * levels).bit_length()
    of_some = NUMBER_BITS + nonzeros * ((entries - 1).bit_length() + 1 + (levels - 1).bit_length())
    return NUMBER_BITS + 1 + of_some.double().clamp_max(of_all)


class QuantizedGradients:
    """Random rounding of gradients to `levels` levels, without bias: QSGD (Alistarh et al. 2017).

    `attach(model)` starts the rounding. In one process, each backward pass's gradients are rounded before they are
    added to `.grad`, so each micro-batch is rounded separately. Under DistributedDataParallel, each rank rounds the
    gradients that it sends, and all ranks get the mean, so their weights remain equal. Each parameter's gradient is a
    vector with its own norm.

    Estimators do not know of the rounding. In one process, estimators that look at backward passes (`split`,
    `per-sample`, `trajectory`, `oracle`) see gradients before the rounding. `moments` looks at steps, so its tr(Sigma)
    includes the noise. `ranks` compares gradients from before and after the rounding, so its estimate is wrong.

    The draws depend on the seed, the rank, the parameter and the number of its roundings, not on the order in which
    gradients arrive. Save `state_dict()` for an exact resume. Bits are counted for an encoder (`bits_to_send`); DDP
    still sends every entry in full.

    Args:
        levels: Number of levels above zero, at least 1. One level keeps signs and a norm; more levels keep more.
        seed: The seed of the draws.

    >>> quantize = QuantizedGradients(1, seed=0)
    >>> quantize(torch.tensor([3.0, 0.0, -4.0]))  # multiples of the norm, 5
    tensor([5., 0., -0.])
    >>> round(quantize.variance_added, 3)  # 5^2 * (0.6 * 0.4 + 0.8 * 0.2)
    10.0
    """

    def __init__(self, levels: int, *, seed: int = 0) -> None:
        require_count("levels", levels)
        self.levels, self.seed = levels, checked_seed(seed)
        self._draws: dict[int, int] = defaultdict(int)
        """Number of draws from each stream so far."""
        self._bits, self._variance, self._bits_unrounded = _Sum(), _Sum(), 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._rank = 0
        self._group: Any = None
        self._streams: dict[nn.Parameter, int] = {}
        """The stream of each parameter of a DDP model, while attached."""
        self._endings: list[Callable[[], None]] = []

    def __call__(self, tensor: Tensor, *, stream: int = 0) -> Tensor:
        """Return `tensor` rounded as a vector; each stream has its own draws."""
        if tensor.is_sparse or tensor.is_complex():
            raise ArgumentError(f"QuantizedGradients takes dense real gradients, got {tensor.layout}, {tensor.dtype}")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError("QuantizedGradients cannot be recorded in a CUDA graph: each replay must draw anew")
        found = rounded(tensor, self.levels, self._draw(tensor, stream))
        self._bits.add(bits_to_send(tensor.numel(), found.nonzeros, self.levels))
        self._bits_unrounded += tensor.numel() * tensor.element_size() * 8
        self._variance.add(found.variance)
        return found.value

    def _draw(self, tensor: Tensor, stream: int) -> Tensor:
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device]
        generator.manual_seed(mixed_seed(self.seed, DRAWS, self._rank, stream, self._draws[stream]))
        self._draws[stream] += 1
        return torch.rand(tensor.shape, generator=generator, device=device)

    @property
    def variance_added(self) -> float:
        """The exact E||Q(v) - v||^2, summed over all vectors rounded so far."""
        return self._variance.read()

    @property
    def bits_sent(self) -> float:
        """Number of bits that an encoder would have sent for all vectors rounded on this rank."""
        return self._bits.read()

    @property
    def bits_unrounded(self) -> int:
        """Number of bits of the same gradients without rounding."""
        return self._bits_unrounded

    def attach(self, model: nn.Module) -> Self:
        """Round the gradients of `model` from the next backward pass until `close` or the end of a with block."""
        if self._endings:
            raise UsageError("these QuantizedGradients are attached to a model already: make new ones for each")
        streams = _streams_of(model)
        if isinstance(model, DistributedDataParallel):
            self._group, self._rank = model.process_group, dist.get_rank(model.process_group)
            model.register_comm_hook(self, _comm_hook)
            self._streams = streams
            self._endings.append(self._streams.clear)
            return self
        _require_one_process()
        for parameter, stream in streams.items():
            # The last place before `.grad`, after hooks on the parameter, which estimators use.
            node = get_gradient_edge(parameter).node
            handle = node.register_prehook(partial(self._before_adding, stream))
            self._endings.append(partial(_remove, handle, node))
        return self

    def close(self) -> None:
        """Stop rounding gradients."""
        while self._endings:
            self._endings.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_adding(self, stream: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if gradients[0] is None:
            return None
        _require_one_process()  # the model may have been wrapped after `attach`
        return (self(gradients[0], stream=stream),)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's numbers of draws, which determine the next draws, and its sums."""
        return {
            "levels": self.levels,
            "seed": self.seed,
            "draws": dict(self._draws),
            "bits": self.bits_sent,
            "bits_unrounded": self._bits_unrounded,
            "variance": self.variance_added,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the draws and sums of a saved state."""
        if state["levels"] != self.levels:
            raise CheckpointError(
                f"QuantizedGradients.levels is {state['levels']} in the checkpoint, and {self.levels} in this run"
            )
        self.seed, self._draws = state["seed"], defaultdict(int, state["draws"])
        self._bits, self._variance = _Sum(state["bits"]), _Sum(state["variance"])
        self._bits_unrounded = state["bits_unrounded"]


def _remove(handle: Any, node: Any) -> None:
    """Remove a hook of an autograd node; `node` keeps the node alive, or autograd would make a new node."""
    handle.remove()


def _comm_hook(
    state: QuantizedGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks the annotations
) -> torch.futures.Future[Tensor]:
    """Round this rank's gradients in a bucket of DDP, then average the bucket over ranks."""
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state._streams:
            gradient.copy_(state(gradient, stream=state._streams[parameter]))
    mine = bucket.buffer().div_(dist.get_world_size(state._group))
    work = dist.all_reduce(mine, group=state._group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


class _Sum:
    """A sum of numbers that stay on their devices until the sum is read."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._more: dict[torch.device, Tensor] = {}

    def add(self, number: Tensor) -> None:
        before = self._more.get(number.device)
        self._more[number.device] = number if before is None else before + number

    def read(self) -> float:
        return self._before + sum(map(float, self._more.values()))


def _streams_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Number the trainable parameters among all parameters, so that freezing some renumbers none."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    streams = {each: number for number, each in enumerate(inner.parameters()) if each.requires_grad}
    if not streams or any(hasattr(each, "full_tensor") for each in streams):  # a DTensor of FSDP2
        what = "FSDP2 has sharded its parameters" if streams else "it has no trainable parameter"
        raise ArgumentError(f"QuantizedGradients cannot work on this {type(model).__name__}: {what}")
    return streams


def _require_one_process() -> None:
    """Raise if ranks train together, because then only DDP's buckets may be rounded."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ArgumentError(
            f"{dist.get_world_size()} ranks train together, and QuantizedGradients are attached to the model of one of "
            f"them: attach them to the DistributedDataParallel around it, which averages the gradients"
        )
