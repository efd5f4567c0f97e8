"""The training step: forward pass, backward pass and optimizer step."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from divebatch.checks import require_choice, require_count
from divebatch.data.micro_batches import BatchPlan, batch_length, cut, micro_batches
from divebatch.errors import BatchTooLargeError
from divebatch.lab.clock import Clock, forget_peak_memory, peak_memory_bytes
from divebatch.lab.cuda_graph import GraphedPasses, MicroBatch, Variant
from divebatch.lab.ranks import Parallel
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.meter import MODES, pausing_meters
from divebatch.ranks import Ranks

PRECISIONS = ("fp32", "tf32", "bf16")
"""Modes of arithmetic with float32 weights: `tf32` multiplies with 10-bit mantissas on GPUs, `bf16` is autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Speed, memory and rounding of a run, whatever its method.

    Args:
        precision: "fp32", "tf32" or "bf16"; weights are float32 in all of them.
        channels_last: Whether images have this memory format.
        compile: Whether to compile full batches with torch.compile.
        cuda_graphs: Whether compiled passes may be recorded and replayed on a GPU, which takes some memory.
        norms: "exact" or "sketch", the mode of per-sample norms if they are measured.
        micro_batch_size: Most samples of a backward pass; larger batches are split, and BatchNorm's statistics are
            those of the parts. None: batches are not split.
    """

    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    norms: str = "exact"
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, PRECISIONS)
        require_choice("norms", self.norms, MODES)
        if self.micro_batch_size is not None:
            require_count("micro_batch_size", self.micro_batch_size)


@contextmanager
def device_settings(precision: str, device: torch.device) -> Iterator[None]:
    """Set the GPU's float32 precision and let it choose convolution kernels by trial; restore both on exit."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        # These are settings of the process, so other code must find them unchanged.
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# From a batch to its loss, plain or compiled

LossFn = Callable[[Any, Any], Tensor]
"""A function of the model's outputs and the targets that returns a batch's mean loss."""

MOST_VARIANTS = 256
"""Most versions of a function that the compiler may make, for all batch sizes and runs, measured or not."""


def predict(model: nn.Module, inputs: Any, precision: str) -> Any:
    """Return the model's outputs in float32, even if the forward pass has a lower precision."""
    if precision != "bf16":
        return model(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    return outputs.float()


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether BatchNorm makes outputs depend on other samples, so that no sample has its own gradient."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def loss_of(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, precision: str) -> Tensor:
    """Run the model on a batch and return the mean loss."""
    return loss_fn(predict(model, inputs, precision), targets)


@cache
def compiled(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """Compile a function once for all runs of a process, so that models of the same build share code.

    DDP's part of the forward pass breaks the graph, so it must be compiled without `fullgraph`.
    """
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # Code for a fixed shape is faster, and a run has few shapes.
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)


class TrainStep:
    """A callable that makes an optimizer step on a batch, as fast as the options allow.

    Compiling takes seconds for each shape, so only full micro-batches are compiled; those of a shorter last batch run
    uncompiled.

    Args:
        parallel: The model on its ranks; `Parallel.alone(model)` for one process.
        loss_fn: The mean loss of a batch, `loss_fn(outputs, targets)`.
        optimizer: The optimizer to step.
        options: Precision, compilation, micro-batches.
        clock: The clock that separates compilation from training; it also names the device.
        plan: Called once for each batch; returns the plan of its passes, such as `control.plan`. The default measures
            nothing and expects batches of equal size.
        on_outgrown: Called with the size of a batch that did not fit into memory, and the largest size that did, before
            the step is repeated in smaller passes. The callback must limit later batches to the size that fits, and
            end measuring in this epoch. None: raise an error.
        clip_norm: The norm to which larger gradients are scaled down. None: no clipping.
    """

    def __init__(
        self,
        parallel: Parallel,
        loss_fn: LossFn,
        optimizer: Optimizer,
        options: DeviceOptions,
        clock: Clock,
        *,
        plan: Callable[[], BatchPlan] = BatchPlan,
        on_outgrown: Callable[[int, int], None] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.parallel, self.loss_fn, self.optimizer, self.options = parallel, loss_fn, optimizer, options
        self.clock, self.plan, self.clip_norm = clock, plan, clip_norm
        self.on_outgrown = on_outgrown
        self.fitted, self.fitted_micro = 0, 0
        """Sizes of the largest batch that fitted into memory, and of its passes."""
        self.counts = True
        """Whether this rank's samples of the last batch count. False: they stand for a missing sample."""
        self.full_size = 0
        """Number of samples of a full micro-batch."""
        self.variants: set[Variant] = set()
        """Kinds of full passes that have run so far."""
        self._short: set[Variant] = set()
        """Kinds of shorter passes that have run so far."""
        self.compiled_before = 0
        """Number of variants that the run had compiled before its resume."""
        on_gpu = clock.device.type == "cuda" and parallel.ranks.is_alone
        may_record = on_gpu and options.compile and options.cuda_graphs
        full_loss = partial(self._loss, is_full=True)
        self.graphs = GraphedPasses(parallel.model, full_loss, self._run, clock, is_enabled=may_record)

    def __call__(self, batch: Any) -> Tensor:
        """Make a step on a batch; return its mean loss at the weights before the step."""
        loss = self._backward(batch)
        # Clip in the last hook before the step: estimators' hooks must see gradients unclipped.
        clips = self.clip_norm is not None
        with self.optimizer.register_step_pre_hook(self._clip) if clips else nullcontext():
            self.optimizer.step()
        return loss

    def _clip(self, *_: Any) -> None:
        assert self.clip_norm is not None
        clip_grad_norm_(self.parallel.model.parameters(), self.clip_norm)

    def under(self, plan: Callable[[], BatchPlan]) -> Self:
        """Return this step, with all compiled code, under another controller's plan."""
        other = copy.copy(self)
        other.plan = plan
        return other

    @property
    def num_compiled(self) -> int:
        """Number of compiled variants; a resumed run compiles again and counts again."""
        return self.compiled_before + (len(self.variants) if self.options.compile else 0)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory since the epoch began, including recordings, which were allocated before."""
        return max(peak_memory_bytes(self.clock.device), self.graphs.peak_bytes)

    def _backward(self, batch: Any) -> Tensor:
        """Compute the gradients of a batch's mean loss, if necessary in smaller passes; return the loss."""
        plan, num_samples = self.plan(), batch_length(batch)
        size = self._micro_batch_size(num_samples, plan)
        loss = self._try(batch, size, plan)
        if loss is not None:
            if num_samples > self.fitted:
                self.fitted, self.fitted_micro = num_samples, size
            return loss
        if self.on_outgrown is not None and 0 < self.fitted < num_samples and self.fitted_micro < size:
            self.on_outgrown(num_samples, self.fitted)
            # Repeat the step in passes that fitted before: no sample is lost, and it remains one step.
            size = self.fitted_micro
            loss = self._try(batch, size, self.plan())
            if loss is not None:
                return loss
        ranks = self.parallel.ranks
        where = "" if ranks.is_alone else f" on rank {ranks.rank}"
        way_out = f"Try micro_batch_size={size // 2}" if size > 1 else "Not even one sample fits"
        raise BatchTooLargeError(
            f"out of memory{where}: batch of {num_samples} samples in micro-batches of {size}. {way_out}"
        )

    def _try(self, batch: Any, size: int, plan: BatchPlan) -> Tensor | None:
        """Run a batch in passes of `size` samples; return its mean loss. None: memory ran out."""
        # Update the full size: the controller may have changed the batch size or its parts.
        self.counts = plan.rank_shard is None or not plan.rank_shard.is_stand_in
        batch_size = plan.batch_size or batch_length(batch)
        self.full_size = self._micro_batch_size(batch_size, plan)
        self.graphs.expect(self.full_size, batch_size)
        self.optimizer.zero_grad()
        try:
            return self._accumulate(batch, math.ceil(batch_length(batch) / size), size, plan)
        except torch.OutOfMemoryError:
            return None  # the error holds memory that the next try needs

    def _micro_batch_size(self, num_samples: int, plan: BatchPlan) -> int:
        most = self.options.micro_batch_size or num_samples
        return min(most, math.ceil(num_samples / plan.min_micro_batches))

    def _accumulate(self, batch: Any, count: int, size: int, plan: BatchPlan) -> Tensor:
        """Run a batch in `count` micro-batches of at most `size` samples; return the sum of weighted losses."""
        for _ in range(count, self._num_passes_of_all(plan)):
            self._run_dummy(batch, plan)
        total: Tensor | None = None
        for number, ((inputs, targets), weight) in enumerate(micro_batches(batch, size), 1):
            is_full, is_last = len(targets) == self.full_size, number == count
            part = MicroBatch(inputs=inputs, targets=targets, weight=weight, is_full=is_full, is_last=is_last)
            loss = self.graphs.run(part, plan)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _num_passes_of_all(self, plan: BatchPlan) -> int:
        """Return the largest number of passes on any rank, because a sharded model needs all ranks in every pass."""
        shard = plan.rank_shard
        if shard is None or not self.parallel.is_sharded:
            return 0
        sizes = max(1, shard.num_samples // shard.num_ranks), math.ceil(shard.num_samples / shard.num_ranks)
        return max(math.ceil(size / self._micro_batch_size(size, plan)) for size in sizes)

    def _run_dummy(self, batch: Any, plan: BatchPlan) -> None:
        """Run a pass of weight zero, so that this rank takes part in every collective."""
        inputs, targets = cut(batch, 0, 1)
        with pausing_meters():
            part = MicroBatch(inputs=inputs, targets=targets, weight=LossWeight(0.0))
            self._run(part, BatchPlan(min_micro_batches=plan.min_micro_batches))

    def _run(self, part: MicroBatch, plan: BatchPlan) -> Tensor:
        """Run a pass kernel by kernel; return the mean loss times the weight."""
        # Average each pass that estimators compare: FSDP2 shows a single pass in no other way.
        averages = part.is_last or (self.parallel.is_sharded and plan.min_micro_batches > 1)
        with self._first_time(part, plan), self.parallel.adding_up(is_last=averages):
            loss = self._loss(part.inputs, part.targets, is_full=part.is_full)
            loss = loss if part.weight == 1.0 else loss * part.weight
            loss.backward()
        return loss.detach()

    def _loss(self, inputs: Any, targets: Any, *, is_full: bool) -> Tensor:
        # Only full passes: an epoch's short rest would double the number of shapes for one step an epoch.
        is_compiled = self.options.compile and is_full
        function = compiled(loss_of, fullgraph=self.parallel.ranks.is_alone) if is_compiled else loss_of
        loss: Tensor = function(self.parallel.module, self.loss_fn, inputs, targets, self.options.precision)
        return loss

    @contextmanager
    def _first_time(self, part: MicroBatch, plan: BatchPlan) -> Iterator[None]:
        """Count the first pass of its kind as compilation, and its memory for trying kernels as no peak.

        An uncompiled first pass counts as training, though a GPU takes a second to choose convolution kernels.
        """
        variant, known = part.variant(plan), self.variants if part.is_full else self._short
        if variant in known:
            yield
            return
        # Compilation takes as long as a short run trains, so it would decide every comparison.
        with self.clock.lap("compile" if self.options.compile else "train"):
            yield
        known.add(variant)
        if part.is_full:
            forget_peak_memory(self.clock.device)


@dataclass(slots=True)
class Tally:
    """The loss summed over an epoch's samples, each at the weights of its step."""

    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_samples: int = 0

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Add a batch's mean loss on the device, because reading each loss would wait for its step."""
        self.loss_sum = self.loss_sum.to(loss.device) + loss * num_samples
        self.num_samples += num_samples

    def mean(self, ranks: Ranks) -> float:
        """Return the mean over the samples of all ranks; wait for the device."""
        loss_sum, num_samples = ranks.sum_numbers([self.loss_sum.item(), self.num_samples])
        return loss_sum / num_samples


def train_epoch(
    step: TrainStep, batches: Iterable[Any], tally: Tally, after_step: Callable[[], None] = lambda: None
) -> float:
    """Make a step on each batch; return the mean loss over all ranks' samples of the epoch."""
    for batch in batches:
        loss = step(batch)
        if step.counts:
            tally.add(loss, batch_length(batch))
        after_step()
    return tally.mean(step.parallel.ranks)
