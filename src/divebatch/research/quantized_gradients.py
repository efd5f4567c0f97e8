"""Gradients rounded at random to a few levels (QSGD): fewer bits to send, and noise that raises the diversity."""

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
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.added_noise import announce
from divebatch.estimators.optimizer_events import is_recorded
from divebatch.norms.sharded import is_sharded
from divebatch.ranks import inside_ddp
from divebatch.state_checks import Check, number, same, table, table_of, whole

DRAWS = 0x51534744
"""Keeps these draws apart from others that are made from the same seed."""
NUMBER_BITS = 32
"""Bits of a norm, and of a count of entries."""


class Rounded(NamedTuple):
    """A vector rounded at random."""

    value: Tensor
    variance: Tensor
    """E||value - vector||^2 over the draws, exactly; in float64."""
    nonzeros: Tensor
    """Entries of `value` that are not zero."""


def rounded(vector: Tensor, levels: int, draws: Tensor) -> Rounded:
    """Round each entry to one of the two neighbours among the multiples of ||vector|| / levels.

    With a = levels * |v_j| / ||v|| and p = a - floor(a), the upper one where its draw is below p: the mean is v, and
    the variance ||v||^2 / levels^2 * sum_j p_j (1 - p_j). `draws` are uniform in [0, 1), one for each entry.
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
    """Bits of a rounded vector: its norm, one bit for which of two forms follows, and the shorter of the two.

    One form has the signed level of each entry, in ceil(log2(2 * levels + 1)) bits. The other has the number of entries
    that are not zero, and for each of these its place, sign and level.
    """
    of_all = entries * (2 * levels).bit_length()
    of_some = NUMBER_BITS + nonzeros * ((entries - 1).bit_length() + 1 + (levels - 1).bit_length())
    return NUMBER_BITS + 1 + of_some.double().clamp_max(of_all)


class QuantizedGradients:
    """Rounds gradients at random to `levels` levels, without bias: QSGD (Alistarh et al. 2017).

    `attach(model)` puts it to work. In one process each backward pass's own gradients are rounded before they are added
    to `.grad`, so it acts on each micro-batch. Under DistributedDataParallel each rank rounds what it is about to send,
    and all get the mean, so their weights stay equal. Each parameter's gradient is a vector with a norm of its own.

    It adds noise of a known size, which controllers find by themselves: policies go by the data's part alone, and the
    record's `noisy_diversity` has both. Estimators that look at backward passes (`split`, `per-sample`, `trajectory`,
    `oracle`) see gradients before they are rounded; `moments` sees them after, and what was added is taken off; `ranks`
    sees both and is an error. Between a backward pass and its step gradients may be multiplied by a number (clipping by
    the norm, a GradScaler); what changes them otherwise is not followed.

    The draws depend on the seed, the rank, the parameter and how often it was rounded, so they do not depend on the
    order in which gradients come, and a resume is exact: the state is in `Controller.state_dict`, and in `state_dict`
    for a loop without one. Bits are counted as an encoder would send them (`bits_to_send`); what DDP sends is
    every entry in full.

    Args:
        levels: Levels above zero, at least 1: 1 keeps signs and a norm, more keep more.
        seed: Decides on the draws.

    >>> quantize = QuantizedGradients(1, seed=0)
    >>> quantize(torch.tensor([3.0, 0.0, -4.0]))  # multiples of the norm, 5
    tensor([5., 0., -0.])
    >>> round(quantize.variance_added, 3)  # 5^2 * (0.6 * 0.4 + 0.8 * 0.2)
    10.0
    """

    def __init__(self, levels: int, *, seed: int = 0) -> None:
        require_count("levels", levels)
        self.levels, self.seed = levels, checked_seed(seed)
        self._calls: dict[int, int] = defaultdict(int)
        """How often each stream was drawn from."""
        self._bits, self._variance, self._bits_unrounded = _Sum(), _Sum(), 0
        self._pending: dict[int, Tensor] = {}
        """The variance of what was added to the gradients at hand, by stream."""
        self._generators: dict[torch.device, torch.Generator] = {}
        self._rank = 0
        self._group: Any = None
        self._places: dict[nn.Parameter, int] = {}
        """The stream of each parameter, while this is attached."""
        self._probe: nn.Parameter | None = None
        self._probe_norm: Tensor | None = None
        """Of the probe's gradient as the last backward pass left it."""
        self._endings: list[Callable[[], None]] = []

    def __call__(self, tensor: Tensor, *, stream: int = 0) -> Tensor:
        """Return `tensor` rounded, as one vector. Each stream has draws of its own."""
        if tensor.is_sparse or tensor.is_complex():
            raise ArgumentError(f"QuantizedGradients takes dense real gradients, got {tensor.layout}, {tensor.dtype}")
        if is_recorded(tensor):
            raise UsageError("QuantizedGradients cannot be recorded in a CUDA graph: each replay must draw anew")
        found = rounded(tensor, self.levels, self._draws(tensor, stream))
        self._bits.add(bits_to_send(tensor.numel(), found.nonzeros, self.levels))
        self._bits_unrounded += tensor.numel() * tensor.element_size() * 8
        self._variance.add(found.variance)
        before = self._pending.get(stream)
        self._pending[stream] = found.variance if before is None else before + found.variance
        return found.value

    def _draws(self, tensor: Tensor, stream: int) -> Tensor:
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device]
        generator.manual_seed(mixed_seed(self.seed, DRAWS, self._rank, stream, self._calls[stream]))
        self._calls[stream] += 1
        return torch.rand(tensor.shape, generator=generator, device=device)

    @property
    def variance_added(self) -> float:
        """E||Q(v) - v||^2, exactly, summed over all that was rounded here."""
        return self._variance.read()

    @property
    def bits_sent(self) -> float:
        """Bits that an encoder would have sent for all that was rounded here, on this rank."""
        return self._bits.read()

    @property
    def bits_unrounded(self) -> int:
        """Bits of the same gradients in full."""
        return self._bits_unrounded

    # At work on a model

    def attach(self, model: nn.Module) -> Self:
        """Round the gradients of `model` from its next backward pass on, until `close` or the end of a with block."""
        if self._endings:
            raise UsageError("these QuantizedGradients are attached to a model already: make others for each")
        places = _places_in(model)
        probe = max(places, key=nn.Parameter.numel)
        if isinstance(model, DistributedDataParallel):
            self._group, self._rank = model.process_group, dist.get_rank(model.process_group)
            model.register_comm_hook(self, _comm_hook)
        else:
            _require_one_process()
            self._endings.append(probe.register_post_accumulate_grad_hook(self._note).remove)
        self._places, self._probe = places, probe
        for parameter, stream in places.items():
            self._watch(parameter, stream, rounds=not isinstance(model, DistributedDataParallel))
        self._endings.append(announce(places, self))
        return self

    def _watch(self, parameter: Tensor, stream: int, *, rounds: bool) -> None:
        # The very last place before `.grad`: hooks on the parameter, which estimators use, come before it.
        node = get_gradient_edge(parameter).node
        handle = node.register_prehook(partial(self._before_adding, parameter, stream, rounds))

        def end(_: Any = node) -> None:  # a node that nobody holds would be made anew, without the hook
            handle.remove()

        self._endings.append(end)

    def close(self) -> None:
        """Leave gradients alone from here on."""
        while self._endings:
            self._endings.pop()()
        self._places, self._probe = {}, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_adding(
        self, parameter: Tensor, stream: int, rounds: bool, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if parameter.grad is None:  # what was added to the last gradient went with it
            self._pending.pop(stream, None)
        if not rounds or gradients[0] is None:
            return None
        _require_one_process()  # a model may be wrapped after it was attached to
        return (self(gradients[0], stream=stream),)

    def _round_bucket(self, bucket: Any) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._places:
                gradient.copy_(self(gradient, stream=self._places[parameter]))

    def _note_bucket(self, bucket: Any) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter is self._probe:
                self._probe_norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)

    def _note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._probe_norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)

    def take_variance(self) -> Tensor | float:
        """E||e||^2 of what was added to the gradients at hand, by their present size; the next call counts anew."""
        pending, self._pending = list(self._pending.values()), {}
        if not pending:
            return 0.0
        device = pending[0].device
        return torch.stack([each.to(device) for each in pending]).sum() * self._sq_factor().to(device)

    def _sq_factor(self) -> Tensor:
        """The square of what gradients were multiplied by since they were made; one of them tells it for all."""
        if self._probe is None or self._probe.grad is None or self._probe_norm is None:
            return torch.ones(())
        now = torch.linalg.vector_norm(self._probe.grad, dtype=torch.float64)
        return torch.where(self._probe_norm > 0, (now / self._probe_norm).square(), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What the draws to come depend on, and the counts so far: those of this rank."""
        return {
            "levels": self.levels,
            "seed": self.seed,
            "calls": dict(self._calls),
            "bits": self.bits_sent,
            "bits_unrounded": self._bits_unrounded,
            "variance": self.variance_added,
        }

    def state_check(self) -> Check:
        """What `state_dict` gives here."""
        return table(
            {
                "levels": same(self.levels),
                "seed": whole(at_most=None),
                "calls": table_of(whole(), whole()),
                "bits": number(at_least=0),
                "bits_unrounded": whole(at_most=None),
                "variance": number(finite=False),  # that of gradients which are not finite is NaN
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Round from here on as the saved one would have done."""
        self.state_check()("QuantizedGradients", state)
        self.seed, self._calls = state["seed"], defaultdict(int, state["calls"])
        self._bits, self._variance = _Sum(state["bits"]), _Sum(state["variance"])
        self._bits_unrounded, self._pending = state["bits_unrounded"], {}


def _comm_hook(
    state: QuantizedGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks the annotations
) -> torch.futures.Future[Tensor]:
    """DDP calls this with each of its buckets: round this rank's gradients, then average over ranks."""
    state._round_bucket(bucket)
    mine = bucket.buffer().div_(dist.get_world_size(state._group))
    work = dist.all_reduce(mine, group=state._group, async_op=True)

    def finish(done: torch.futures.Future[Any]) -> Tensor:
        state._note_bucket(bucket)
        averaged: Tensor = done.value()[0]
        return averaged

    future: torch.futures.Future[Tensor] = work.get_future().then(finish)
    return future


class _Sum:
    """A sum of numbers that stay on their devices until it is read."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._more: dict[torch.device, Tensor] = {}

    def add(self, number: Tensor) -> None:
        before = self._more.get(number.device)
        self._more[number.device] = number if before is None else before + number

    def read(self) -> float:
        return self._before + sum(map(float, self._more.values()))


def _places_in(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of each trainable parameter among all of the model's, so that freezing some renumbers none."""
    named = inside_ddp(model).named_parameters()
    places = {parameter: number for number, (_, parameter) in enumerate(named) if parameter.requires_grad}
    if not places or any(map(is_sharded, places)):
        what = "FSDP2 has sharded its parameters" if places else "it has no trainable parameter"
        raise ArgumentError(f"QuantizedGradients cannot work on this {type(model).__name__}: {what}")
    return places


def _require_one_process() -> None:
    """Raise where ranks train together: what a rank rounds is what DDP is about to send."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ArgumentError(
            f"{dist.get_world_size()} ranks train together, and QuantizedGradients are attached to the model of one of "
            f"them: attach them to the DistributedDataParallel around it, which averages the gradients"
        )
