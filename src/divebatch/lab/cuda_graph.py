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
"""The number of samples of a pass, and whether the pass is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The samples of one backward pass."""

    inputs: Any
    targets: Any
    weight: LossWeight
    """The factor of the pass's mean loss. 0: the pass does not count."""
    is_full: bool = False
    """Whether the pass has full size: only full passes are compiled and recorded, not an epoch's short rest."""
    is_last: bool = False
    """Whether this is the last pass of its batch."""

    def variant(self, plan: BatchPlan) -> Variant:
        return len(self.targets), plan.measuring


class Recording:
    """A recorded pass, launched at once: at small batches a GPU otherwise waits for hundreds of single launches.

    Inputs and gradients have fixed addresses. `run(inputs, targets)` returns the loss. The caller must have called
    `run` with the same shapes before, so that nothing is left to compile or to choose.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], run: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
    ) -> None:
        # A replay reads and writes the addresses it was recorded with, so its inputs need a fixed place.
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        waiting = {name: parameter.grad for name, parameter in parameters.items()}  # from the batch's earlier parts
        try:
            for parameter in parameters.values():
                parameter.grad = None  # so that the recording writes gradients instead of adding
            with torch.cuda.graph(self._graph):
                loss = run(self._inputs, self._targets)
                loss.backward()
            self._loss = loss.detach()
            self._parameters = {name: each for name, each in parameters.items() if each.grad is not None}
            self.gradients: dict[str, Tensor] = {name: each.grad for name, each in self._parameters.items()}  # type: ignore[misc]
            """Gradients of the last replay alone, valid until the next replay."""
        finally:
            for name, parameter in parameters.items():
                parameter.grad = waiting[name]

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Replay the pass on new data without touching parameters; return the loss, valid until the next replay."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss

    def hand_over(self) -> None:
        """Set the parameters' gradients to those of the last replay."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.gradients[name]

    def add_up(self, weight: float) -> None:
        """Add the last replay's gradients times `weight` to the parameters' gradients."""
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
    """The plan's replay token when this was recorded; the recording is valid for no other token."""
    peak_bytes: int


class GraphedPasses:
    """A runner that records full passes at their second call and replays them from then on, if `is_enabled`.

    A recording that measures adds to the sums of its time, so new sums need a new recording. If some batches run in
    parts and others whole, each kind has its own recording.

    Args:
        model: The model whose parameters get gradients.
        loss_of: Returns the mean loss of full inputs and targets; this call is recorded.
        run_eagerly: Runs a pass kernel by kernel.
        clock: The clock that counts recording as compilation.
        is_enabled: Whether a GPU is there and may record.
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
        """The replay token of each variant's last pass without a recording."""

    def expect(self, full_size: int, batch_size: int) -> None:
        """Expect full passes of `full_size` samples from batches of `batch_size`.

        If the batch size has changed, drop the recordings of passes of other sizes.
        """
        if batch_size != self._batch_size:
            self._keep(lambda variant, _: variant[0] == full_size)
            self._ran = {variant: token for variant, token in self._ran.items() if variant[0] == full_size}
        self._batch_size = batch_size

    def run(self, part: MicroBatch, plan: BatchPlan) -> Tensor:
        """Add the gradients of the part's weighted mean loss to the parameters'; return this weighted loss."""
        variant, token = part.variant(plan), plan.replay_token
        if not self.is_enabled or not part.is_full or not part.weight or token is None:
            return self._run_eagerly(part, plan)
        recorded = self._recorded.get(variant)
        # A recording that measures adds to the sums of its time, which nobody reads under another token.
        if recorded is None or recorded.token != token:
            # First run kernel by kernel, so that nothing is left to compile or to choose while recording.
            if self._ran.get(variant) != token:
                loss = self._run_eagerly(part, plan)
                self._ran[variant] = token
                return loss
            recorded = self._recorded[variant] = self._record(part, plan)
        return self._replay(recorded.recording, part, plan)

    @property
    def peak_bytes(self) -> int:
        """The most memory of a recording, allocated when the pass was recorded; 0 without recordings."""
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
        """Record a pass without its weight, so that the recording serves parts of batches of all sizes."""
        size, measuring = part.variant(plan)
        token = plan.replay_token  # keeps no recording that is not needed now
        self._keep(lambda other, made: other[0] != size and (other[1], made.token) == (measuring, token))
        trainable = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        with self._clock.lap("compile"):
            forget_peak_memory(self._clock.device)
            # The part's weight is applied after each replay.
            recording = Recording(trainable, self._loss_of, part.inputs, part.targets)
            return _Recorded(recording, token, peak_memory_bytes(self._clock.device))

    def _keep(self, is_of_use: Callable[[Variant, _Recorded], bool]) -> None:
        self._recorded = {variant: each for variant, each in self._recorded.items() if is_of_use(variant, each)}
