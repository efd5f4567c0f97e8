"""Forward and backward passes as CUDA graphs: recorded once, then replayed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.data.micro_batches import BatchPlan
from divebatch.lab.clock import Clock, forget_peak_memory, peak_memory_bytes
from divebatch.norms.loss_scale import LossWeight

Variant = tuple[int, bool]
"""Samples of a pass, and whether it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The samples of one backward pass."""

    inputs: Any
    targets: Any
    weight: LossWeight
    """The factor of its mean loss; 0 where it counts for nothing."""
    is_full: bool = False
    """Whether it is as large as most: only those are compiled and recorded, not the rest of an epoch."""
    is_last: bool = False
    """Whether no other pass of its batch follows."""

    def variant(self, plan: BatchPlan) -> Variant:
        return len(self.targets), plan.measuring


class Recording:
    """Launches a whole pass at once: at small batches a GPU otherwise waits for hundreds of single launches.

    Inputs are copied into fixed places and gradients come out at fixed places. `run(inputs, targets)` gives the loss
    and must have run before with the same shapes, so that nothing is left to compile or to choose.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], run: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
    ) -> None:
        # A replay reads and writes the addresses it was recorded with, so its inputs need a fixed place.
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        waiting = {name: parameter.grad for name, parameter in parameters.items()}  # of the batch's earlier parts
        try:
            for parameter in parameters.values():
                parameter.grad = None  # made within the recording, they are written and not added to
            with torch.cuda.graph(self._graph):
                loss = run(self._inputs, self._targets)
                loss.backward()
            self._loss = loss.detach()
            self._parameters = {name: each for name, each in parameters.items() if each.grad is not None}
            self.gradients: dict[str, Tensor] = {name: each.grad for name, each in self._parameters.items()}  # type: ignore[misc]
            """Gradients of the last replay alone, whatever was added up; valid until the next one."""
        finally:
            for name, parameter in parameters.items():
                parameter.grad = waiting[name]

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the pass on new data and leave the parameters' gradients; return its loss, valid until the next one."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss

    def hand_over(self) -> None:
        """Make the last replay's gradients the parameters'."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.gradients[name]

    def add_up(self, weight: float) -> None:
        """Add the last replay's gradients times `weight` to the parameters'; costs one copy of them."""
        first: list[str] = []
        others: list[str] = []
        for name, parameter in self._parameters.items():
            (first if parameter.grad is None else others).append(name)
        if others:
            totals = [self._parameters[name].grad for name in others]
            torch._foreach_add_(totals, [self.gradients[name] for name in others], alpha=weight)  # type: ignore[arg-type]
        if first:
            scaled = torch._foreach_mul([self.gradients[name] for name in first], weight)
            for name, gradient in zip(first, scaled, strict=True):
                self._parameters[name].grad = gradient


@dataclass(frozen=True, slots=True)
class _Recorded:
    recording: Recording
    token: object
    """The plan's replay token that it was made with, and is valid for."""
    peak_bytes: int


class GraphedPasses:
    """Records full passes the second time they come and replays them from then on, where `is_enabled`.

    A recording that measures adds to the sums it was made with, so it is made anew whenever those are. Where some
    batches go through in parts and some as a whole, there is one for each.

    Args:
        model: The model whose parameters get gradients.
        loss_of: Gives the mean loss of full inputs and targets, to be recorded.
        run_eagerly: Runs a pass kernel by kernel.
        clock: Counts recording as the compiler's time.
        is_enabled: Whether there is a GPU that may record.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[Any, Any], Tensor],
        run_eagerly: Callable[[MicroBatch, BatchPlan], Tensor],
        clock: Clock,
        *,
        is_enabled: bool,
    ) -> None:
        self.is_enabled = is_enabled
        self._model, self._loss_of, self._run_eagerly, self._clock = model, loss_of, run_eagerly, clock
        self._batch_size = 0
        self._recorded: dict[Variant, _Recorded] = {}
        self._ran: dict[Variant, object] = {}
        """The tokens with which passes last ran kernel by kernel."""

    def expect(self, full_size: int, batch_size: int) -> None:
        """Expect full passes of `full_size` samples, which are parts of batches of `batch_size`, or all of one.

        With another batch size, recordings of passes of other sizes are dropped.
        """
        if batch_size != self._batch_size:
            self._keep(lambda variant, _: variant[0] == full_size)
            self._ran = {variant: token for variant, token in self._ran.items() if variant[0] == full_size}
        self._batch_size = batch_size

    def run(self, part: MicroBatch, plan: BatchPlan) -> Tensor:
        """Add the gradients of the part's mean loss times its weight to the parameters'; returns that product."""
        variant, token = part.variant(plan), plan.replay_token
        if not self.is_enabled or not part.is_full or not part.weight or token is None:
            return self._run_eagerly(part, plan)
        recorded = self._recorded.get(variant)
        # A recording that measures adds to the sums of its time: with another token those are no longer read.
        if recorded is None or recorded.token != token:
            # Once kernel by kernel first, so that nothing is left to compile or to choose while recording.
            if self._ran.get(variant) != token:
                loss = self._run_eagerly(part, plan)
                self._ran[variant] = token
                return loss
            recorded = self._recorded[variant] = self._record(part, plan)
        return self._replay(recorded.recording, part, plan)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a recording took, which was allocated when it was made; 0 without any."""
        return max((each.peak_bytes for each in self._recorded.values()), default=0)

    def _replay(self, recording: Recording, part: MicroBatch, plan: BatchPlan) -> Tensor:
        loss = recording(part.inputs, part.targets)
        if part.weight == 1.0:
            recording.hand_over()
        else:
            recording.add_up(part.weight)
            loss = loss * part.weight
        # A replay runs kernels without Python, so no hook has seen these gradients.
        plan.see_replay(recording.gradients, part.weight)
        return loss

    def _record(self, part: MicroBatch, plan: BatchPlan) -> _Recorded:
        """Record a pass by itself, whatever its weight, so that it serves for parts of batches of all sizes."""
        size, measuring = part.variant(plan)
        token = plan.replay_token  # no memory for more recordings than are needed at a time
        self._keep(lambda other, made: other[0] != size and (other[1], made.token) == (measuring, token))
        trainable = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        with self._clock.lap("compile"):
            forget_peak_memory(self._clock.device)
            # Without the part's weight, which is applied afterwards: one recording serves batches of all sizes.
            recording = Recording(trainable, self._loss_of, part.inputs, part.targets)
            return _Recorded(recording, token, peak_memory_bytes(self._clock.device))

    def _keep(self, is_of_use: Callable[[Variant, _Recorded], bool]) -> None:
        self._recorded = {variant: each for variant, each in self._recorded.items() if is_of_use(variant, each)}
