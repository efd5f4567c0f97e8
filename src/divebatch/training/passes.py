"""From inputs to gradients: a forward and a backward pass, plain, compiled, or recorded and replayed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.norms.share import part_of_batch
from divebatch.training.clock import Clock, forget_peak_memory, peak_memory_bytes
from divebatch.training.distributed import Parallel
from divebatch.training.recording import Recording
from divebatch.training.setup import Setup

LossFn = Callable[[Any, Any], Tensor]
OnReplay = Callable[[Mapping[str, Tensor]], None]
"""Told the gradients of a pass by the parameters' names."""

Key = tuple[int, bool, object]
"""Samples, whether norms are measured, and the token for which a recording is valid."""

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
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    return torch.compile(loss_of, dynamic=False, fullgraph=fullgraph)


class Passes:
    """Runs the passes of a training run in the fastest way its setup allows.

    The compiler makes code for one shape, which takes seconds, so only batches of `full_size` samples go through it;
    a shorter last one runs uncompiled. On a GPU a compiled pass, of a whole batch or of a part, is recorded the second
    time it comes and replayed from then on. A recording that measures adds to the sums it was made with, so it is made
    anew whenever those are.
    """

    def __init__(self, parallel: Parallel, loss_fn: LossFn, setup: Setup, clock: Clock) -> None:
        self.parallel, self.loss_fn, self.setup, self.clock = parallel, loss_fn, setup, clock
        self.full_size = 0
        self.variants: set[tuple[int, bool]] = set()
        """(samples, whether norms are measured) of full batches that ran so far."""
        self._short: set[tuple[int, bool]] = set()
        """The same of shorter ones."""
        self.compiled_before = 0
        """Variants of an earlier life of this run."""
        self._recording: Recording | None = None
        self._recorded_key: Key | None = None
        self._recorded_peak = 0
        self._ran_last: Key | None = None
        """What ran last of those that may be recorded, kernel by kernel: nothing is left to compile or to choose."""

    def begin_epoch(self, full_size: int) -> None:
        """Batches have this many samples from now on, but for the last."""
        self.expect(full_size)
        forget_peak_memory(self.clock.device)

    def expect(self, full_size: int) -> None:
        """The same, also within an epoch: what was recorded for another size is dropped."""
        if full_size != self.full_size:
            self._forget_recording()
        self.full_size = full_size

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        *,
        share: float,
        measuring: bool,
        token: object = True,
        is_last: bool = True,
        on_replay: OnReplay = lambda _: None,
    ) -> Tensor:
        """Add the gradients of the mean loss times `share` to the parameters'; that product.

        Passes may be recorded once and replayed while `token` is the same and not None. No hook sees a replay, so
        `on_replay` is told its gradients, those of the mean loss itself. `is_last`: no pass of this batch follows, and
        gradients are brought together over ranks.
        """
        variant = (len(targets), measuring)
        key = (*variant, token) if share > 0 and token is not None and self._may_record(variant) else None
        if key is not None and key in (self._recorded_key, self._ran_last):
            recording = self._recording_for(key, inputs, targets)
            return self._replay(recording, inputs, targets, share, on_replay)
        with self._first_time(variant), self.parallel.adding_up(is_last=is_last):
            loss = self._loss(inputs, targets)
            loss = loss if share == 1 else loss * share
            loss.backward()
        self._ran_last = key or self._ran_last
        return loss.detach()

    @property
    def num_compiled(self) -> int:
        """Variants the compiler was asked for; a resumed run asks again."""
        return self.compiled_before + (len(self.variants) if self.setup.compile else 0)

    @property
    def peak_memory_bytes(self) -> int:
        """Since the epoch began; what a recording takes was allocated when it was made."""
        return max(peak_memory_bytes(self.clock.device), self._recorded_peak if self._recording else 0)

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        is_compiled = self.setup.compile and len(targets) == self.full_size
        function = compiled_loss_of(fullgraph=self.parallel.ranks.is_alone) if is_compiled else loss_of
        return function(self.parallel.module, self.loss_fn, inputs, targets, self.setup.precision)

    @contextmanager
    def _first_time(self, variant: tuple[int, bool]) -> Iterator[None]:
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

    def _may_record(self, variant: tuple[int, bool]) -> bool:
        on_gpu = self.clock.device.type == "cuda" and self.parallel.ranks.is_alone
        return on_gpu and self.setup.compile and self.setup.cuda_graphs and variant[0] == self.full_size

    def _replay(self, recording: Recording, inputs: Any, targets: Any, share: float, on_replay: OnReplay) -> Tensor:
        loss = recording(inputs, targets)
        if share == 1:
            recording.hand_over()
        else:
            recording.add_up(share)
            loss = loss * share
        on_replay(recording.gradients)
        return loss

    def _recording_for(self, key: Key, inputs: Any, targets: Any) -> Recording:
        if self._recording is None or key != self._recorded_key:
            self._forget_recording()  # first, so that there is never memory for two
            with self.clock.lap("compile"):
                forget_peak_memory(self.clock.device)
                self._recording = self._recorded(inputs, targets)
                self._recorded_key, self._recorded_peak = key, peak_memory_bytes(self.clock.device)
        return self._recording

    def _recorded(self, inputs: Any, targets: Any) -> Recording:
        """Of a batch by itself, so that it serves for parts of batches of all sizes."""
        trainable = {name: each for name, each in self.parallel.model.named_parameters() if each.requires_grad}
        with part_of_batch(1.0):
            return Recording(trainable, self._loss, inputs, targets)

    def _forget_recording(self) -> None:
        self._recording = self._recorded_key = None
