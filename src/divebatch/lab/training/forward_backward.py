"""From inputs to gradients: a forward and a backward pass, plain, compiled, or recorded and replayed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.lab.training.clock import Clock, forget_peak_memory, peak_memory_bytes
from divebatch.lab.training.cuda_graph import Recording
from divebatch.lab.training.device_options import Setup
from divebatch.lab.training.distributed import Parallel
from divebatch.norms.loss_scale import LossWeight

LossFn = Callable[[Any, Any], Tensor]
OnReplay = Callable[[Mapping[str, Tensor], LossWeight], None]
"""Told the gradients of a pass's mean loss by the parameters' names, and the weight of that loss."""

Variant = tuple[int, bool]
"""Samples, and whether norms are measured."""

MOST_VARIANTS = 256
"""Of one function that the compiler may make: batch sizes times measuring or not, over all runs of a process."""


def predict(model: nn.Module, inputs: Any, precision: str) -> Any:
    """The model's outputs; float32 where they were computed in less."""
    if precision != "bf16":
        return model(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    return outputs.float()


def loss_of(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, precision: str) -> Tensor:
    """The mean loss of a batch."""
    return loss_fn(predict(model, inputs, precision), targets)


@cache
def compiled_loss_of(*, fullgraph: bool = True) -> Callable[..., Tensor]:
    """One for all runs of a process: a second model of the same build takes the code compiled for the first.

    DDP's own part of the forward pass is not compiled, which breaks the graph: not `fullgraph`.
    """
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    return torch.compile(loss_of, dynamic=False, fullgraph=fullgraph)


@dataclass(slots=True)
class Recorded:
    """A recording, and what it is good for."""

    recording: Recording
    token: object
    """It is valid for this one."""
    peak_bytes: int


class Passes:
    """Runs the passes of a training run in the fastest way its setup allows.

    The compiler makes code for one shape, which takes seconds, so only passes of `full_size` samples go through it; one
    of a shorter last batch runs uncompiled. On a GPU a compiled pass, of a whole batch or of a part, is recorded the
    second time it comes and replayed from then on. A recording that measures adds to the sums it was made with, so it
    is made anew whenever those are. Where some batches go through in parts and some as a whole, there is one for each.
    """

    def __init__(self, parallel: Parallel, loss_fn: LossFn, setup: Setup, clock: Clock) -> None:
        self.parallel, self.loss_fn, self.setup, self.clock = parallel, loss_fn, setup, clock
        self.full_size = self._batch_size = 0
        self.variants: set[Variant] = set()
        """Of full size, that ran so far."""
        self._short: set[Variant] = set()
        """The same of shorter ones."""
        self.compiled_before = 0
        """Variants of an earlier life of this run."""
        self._recorded: dict[Variant, Recorded] = {}
        self._ran: dict[Variant, object] = {}
        """The tokens with which those that may be recorded ran last, kernel by kernel: nothing is left to compile or
        to choose."""

    def begin_epoch(self, full_size: int, *, batch_size: int | None = None) -> None:
        """As `expect`; the peak of memory counts from here."""
        self.expect(full_size, batch_size=batch_size)
        forget_peak_memory(self.clock.device)

    def expect(self, full_size: int, *, batch_size: int | None = None) -> None:
        """Passes have `full_size` samples from now on, but for the last ones of an epoch.

        They are the parts of batches of `batch_size`, or these as a whole. With another such size, what was recorded of
        passes of other sizes is dropped.
        """
        batch_size = full_size if batch_size is None else batch_size
        if batch_size != self._batch_size:
            self._keep(lambda variant, _: variant[0] == full_size)
            self._ran = {variant: token for variant, token in self._ran.items() if variant[0] == full_size}
        self.full_size, self._batch_size = full_size, batch_size

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        *,
        share: LossWeight,
        measuring: bool,
        token: object = True,
        is_last: bool = True,
        on_replay: OnReplay = lambda _, __: None,
    ) -> Tensor:
        """Add the gradients of the mean loss times `share` to the parameters'; that product.

        Passes may be recorded once and replayed while `token` is the same and not None. No hook sees a replay, so
        `on_replay` is told its gradients, those of the mean loss itself. `is_last`: no pass of this batch follows, and
        gradients are brought together over ranks.
        """
        variant = (len(targets), measuring)
        may_record = share > 0 and token is not None and self._may_record(variant)
        if may_record and (self._find(variant, token) is not None or self._ran.get(variant) == token):
            recording = self._recording_for(variant, token, inputs, targets)
            return self._replay(recording, inputs, targets, share, on_replay)
        with self._first_time(variant), self.parallel.adding_up(is_last=is_last):
            loss = self._loss(inputs, targets)
            loss = loss if share == 1.0 else loss * share
            loss.backward()
        if may_record:
            self._ran[variant] = token
        return loss.detach()

    @property
    def num_compiled(self) -> int:
        """Variants the compiler was asked for; a resumed run asks again."""
        return self.compiled_before + (len(self.variants) if self.setup.compile else 0)

    @property
    def peak_memory_bytes(self) -> int:
        """Since the epoch began; what a recording takes was allocated when it was made."""
        return max([peak_memory_bytes(self.clock.device), *(each.peak_bytes for each in self._recorded.values())])

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        is_compiled = self.setup.compile and len(targets) == self.full_size
        function = compiled_loss_of(fullgraph=self.parallel.ranks.is_alone) if is_compiled else loss_of
        return function(self.parallel.module, self.loss_fn, inputs, targets, self.setup.precision)

    @contextmanager
    def _first_time(self, variant: Variant) -> Iterator[None]:
        """The first pass of its kind is the compiler's time, or that of a GPU's library, which takes a second for the
        convolutions of a short batch it has not seen. The memory a compiler takes to try kernels is no peak."""
        is_full = variant[0] == self.full_size
        known = self.variants if is_full else self._short
        if variant in known:
            yield
            return
        with self.clock.lap("compile" if self.setup.compile else "train"):
            yield
        known.add(variant)
        if is_full:
            forget_peak_memory(self.clock.device)

    def _may_record(self, variant: Variant) -> bool:
        on_gpu = self.clock.device.type == "cuda" and self.parallel.ranks.is_alone
        return on_gpu and self.setup.compile and self.setup.cuda_graphs and variant[0] == self.full_size

    def _replay(
        self, recording: Recording, inputs: Any, targets: Any, share: LossWeight, on_replay: OnReplay
    ) -> Tensor:
        loss = recording(inputs, targets)
        if share == 1.0:
            recording.hand_over()
        else:
            recording.add_up(share)
            loss = loss * share
        on_replay(recording.gradients, share)
        return loss

    def _find(self, variant: Variant, token: object) -> Recorded | None:
        found = self._recorded.get(variant)
        return found if found is not None and found.token == token else None

    def _recording_for(self, variant: Variant, token: object, inputs: Any, targets: Any) -> Recording:
        found = self._find(variant, token)
        if found is None:  # no memory for more recordings than are needed at a time
            self._keep(lambda other, made: other[0] != variant[0] and (other[1], made.token) == (variant[1], token))
            with self.clock.lap("compile"):
                forget_peak_memory(self.clock.device)
                recording = self._record(inputs, targets)
                found = Recorded(recording, token, peak_memory_bytes(self.clock.device))
            self._recorded[variant] = found
        return found.recording

    def _record(self, inputs: Any, targets: Any) -> Recording:
        """Of a batch by itself, so that it serves for parts of batches of all sizes."""
        trainable = {name: each for name, each in self.parallel.model.named_parameters() if each.requires_grad}
        return Recording(trainable, self._loss, inputs, targets)

    def _keep(self, is_of_use: Callable[[Variant, Recorded], bool]) -> None:
        self._recorded = {variant: each for variant, each in self._recorded.items() if is_of_use(variant, each)}
