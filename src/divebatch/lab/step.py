"""The central loop of training: forward, backward, step, in one place."""

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
"""Weights are float32 in all. `tf32` multiplies with ten bits of mantissa on GPUs that can; `bf16` is autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Speed, memory and rounding of a run, whatever its method.

    Args:
        precision: "fp32", "tf32" or "bf16"; weights are float32 in all of them.
        channels_last: whether images have that memory format.
        compile: whether full batches go through torch.compile.
        cuda_graphs: whether compiled passes may be recorded and replayed on a GPU, at the price of some memory.
        norms: "exact" or "sketch", the mode of per-sample norms where they are measured.
        micro_batch_size: the most samples of one backward pass; larger batches are cut up, with BatchNorm's statistics
            those of the parts. None: batches go through whole.
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
    """Let a GPU multiply float32 as `precision` says, and try its convolution kernels once for each shape."""
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
        # They are settings of the process: other code in it must find them as it left them.
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# From a batch to its loss, plain or compiled

LossFn = Callable[[Any, Any], Tensor]
"""Gives the mean loss of a batch, from the model's outputs and the targets."""

MOST_VARIANTS = 256
"""Versions of one function that the compiler may make: batch sizes times measuring or not, for all runs together."""


def predict(model: nn.Module, inputs: Any, precision: str) -> Any:
    """Return the model's outputs, in float32 even if they were computed in less."""
    if precision != "bf16":
        return model(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    return outputs.float()


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the samples of a pass change each other's outputs, so that none has its own gradient."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def loss_of(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, precision: str) -> Tensor:
    """Return the mean loss of a batch."""
    return loss_fn(predict(model, inputs, precision), targets)


@cache
def compiled(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """Compile a function once for all runs of a process: a second model of the same build takes the first one's code.

    DDP's own part of the forward pass breaks the graph, and so must not be compiled with `fullgraph`.
    """
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # Code for one shape is faster than code for any, and a run has few shapes.
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)


class TrainStep:
    """One optimizer step on one batch, in the fastest way the options allow.

    The compiler makes code for one shape, which takes seconds, so only full micro-batches go through it; those of a
    shorter last batch run uncompiled.

    Args:
        parallel: The model, and how ranks run it together (`Parallel.alone(model)` for one process).
        loss_fn: The mean loss of a batch, `loss_fn(outputs, targets)`.
        optimizer: The optimizer that steps.
        options: Precision, compiling, micro-batches.
        clock: Books the compiler's time apart from training, and knows the device.
        plan: Called once for each batch; says how it must go through the model. `control.plan`, or the default: nothing
            is measured, and each batch is as large as the others.
        on_outgrown: Called with the size of a batch that did not fit into memory, and the largest that did, before the
            step is made again in passes that fit. It must keep later batches within that size, and measuring out of
            this epoch. None: a batch that does not fit is an error.
        clip_norm: The norm that larger gradients are scaled down to for the step. None: all stay as they are.
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
        """Samples of the largest batch that fitted into memory, and of its passes."""
        self.counts = True
        """Whether this rank's samples of the last batch count: not a dummy's, where none was left for it."""
        self.full_size = 0
        """Samples of a full micro-batch."""
        self.variants: set[Variant] = set()
        """The kinds of full passes that ran so far."""
        self._short: set[Variant] = set()
        """The kinds of shorter ones."""
        self.compiled_before = 0
        """Variants that the run had compiled before it was resumed."""
        on_gpu = clock.device.type == "cuda" and parallel.ranks.is_alone
        may_record = on_gpu and options.compile and options.cuda_graphs
        full_loss = partial(self._loss, is_full=True)
        self.graphs = GraphedPasses(parallel.model, full_loss, self._run, clock, is_enabled=may_record)

    def __call__(self, batch: Any) -> Tensor:
        """Go forward, backward, and step; return the batch's mean loss at the weights before the step."""
        loss = self._backward(batch)
        # As the last hook before the step: estimators look at gradients in one of theirs, and must see them whole.
        clips = self.clip_norm is not None
        with self.optimizer.register_step_pre_hook(self._clip) if clips else nullcontext():
            self.optimizer.step()
        return loss

    def _clip(self, *_: Any) -> None:
        assert self.clip_norm is not None
        clip_grad_norm_(self.parallel.model.parameters(), self.clip_norm)

    def under(self, plan: Callable[[], BatchPlan]) -> Self:
        """Return the same step, with all that was compiled, under another controller's plan."""
        other = copy.copy(self)
        other.plan = plan
        return other

    @property
    def num_compiled(self) -> int:
        """Variants that the compiler was asked for; a resumed run asks again."""
        return self.compiled_before + (len(self.variants) if self.options.compile else 0)

    @property
    def peak_memory_bytes(self) -> int:
        """The peak since the epoch began; what a recording takes was allocated when it was made."""
        return max(peak_memory_bytes(self.clock.device), self.graphs.peak_bytes)

    def _backward(self, batch: Any) -> Tensor:
        """Make the gradients of a batch's mean loss, if need be in passes that fit into memory; return that loss."""
        plan, num_samples = self.plan(), batch_length(batch)
        size = self._micro_batch_size(num_samples, plan)
        loss = self._try(batch, size, plan)
        if loss is not None:
            if num_samples > self.fitted:
                self.fitted, self.fitted_micro = num_samples, size
            return loss
        if self.on_outgrown is not None and 0 < self.fitted < num_samples and self.fitted_micro < size:
            self.on_outgrown(num_samples, self.fitted)
            # The same step in passes that fitted before: no sample is lost, and it is still one step.
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
        """Go through a batch in passes of `size` samples; return its mean loss, or None if memory runs out."""
        # What a full batch is: the controller may have changed its size, or want it in other parts.
        self.counts = plan.rank_shard is None or not plan.rank_shard.is_stand_in
        batch_size = plan.batch_size or batch_length(batch)
        self.full_size = self._micro_batch_size(batch_size, plan)
        self.graphs.expect(self.full_size, batch_size)
        self.optimizer.zero_grad()
        try:
            return self._accumulate(batch, math.ceil(batch_length(batch) / size), size, plan)
        except torch.OutOfMemoryError:
            return None  # what failed holds memory until here, and what follows needs it

    def _micro_batch_size(self, num_samples: int, plan: BatchPlan) -> int:
        most = self.options.micro_batch_size or num_samples
        return min(most, math.ceil(num_samples / plan.min_micro_batches))

    def _accumulate(self, batch: Any, count: int, size: int, plan: BatchPlan) -> Tensor:
        """Run all micro-batches of a batch, `count` of at most `size` samples; return the sum of weighted losses."""
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
        """Return the passes of the rank that has most: a sharded model needs all ranks in every pass."""
        shard = plan.rank_shard
        if shard is None or not self.parallel.is_sharded:
            return 0
        sizes = max(1, shard.num_samples // shard.num_ranks), math.ceil(shard.num_samples / shard.num_ranks)
        return max(math.ceil(size / self._micro_batch_size(size, plan)) for size in sizes)

    def _run_dummy(self, batch: Any, plan: BatchPlan) -> None:
        """Run a pass that counts for nothing, so that this rank takes part in every collective."""
        inputs, targets = cut(batch, 0, 1)
        with pausing_meters():
            part = MicroBatch(inputs=inputs, targets=targets, weight=LossWeight(0.0))
            self._run(part, BatchPlan(min_micro_batches=plan.min_micro_batches))

    def _run(self, part: MicroBatch, plan: BatchPlan) -> Tensor:
        """Go forward and backward, kernel by kernel; return the mean loss times the weight."""
        # Passes that are compared on shards must each be averaged: FSDP2 shows them in no other way.
        averages = part.is_last or (self.parallel.is_sharded and plan.min_micro_batches > 1)
        with self._first_time(part, plan), self.parallel.adding_up(is_last=averages):
            loss = self._loss(part.inputs, part.targets, is_full=part.is_full)
            loss = loss if part.weight == 1.0 else loss * part.weight
            loss.backward()
        return loss.detach()

    def _loss(self, inputs: Any, targets: Any, *, is_full: bool) -> Tensor:
        # Full ones alone: an epoch's short rest would double the number of shapes for one step an epoch.
        is_compiled = self.options.compile and is_full
        function = compiled(loss_of, fullgraph=self.parallel.ranks.is_alone) if is_compiled else loss_of
        loss: Tensor = function(self.parallel.module, self.loss_fn, inputs, targets, self.options.precision)
        return loss

    @contextmanager
    def _first_time(self, part: MicroBatch, plan: BatchPlan) -> Iterator[None]:
        """Book the first pass of its kind as compiling; the memory that a compiler takes to try kernels is no peak.

        Uncompiled it counts as training, though a GPU's library takes a second for convolutions of a new shape.
        """
        variant, known = part.variant(plan), self.variants if part.is_full else self._short
        if variant in known:
            yield
            return
        # Compiling takes as long as a short run trains: counted in, it would decide every comparison.
        with self.clock.lap("compile" if self.options.compile else "train"):
            yield
        known.add(variant)
        if part.is_full:
            forget_peak_memory(self.clock.device)


@dataclass(slots=True)
class Tally:
    """The loss summed over the samples of an epoch, each at the weights it met."""

    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_samples: int = 0

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Add a batch's mean loss, on the device: reading each loss would wait for every step."""
        self.loss_sum = self.loss_sum.to(loss.device) + loss * num_samples
        self.num_samples += num_samples

    def mean(self, ranks: Ranks) -> float:
        """Return the mean over the samples of all ranks; waits for the device."""
        loss_sum, num_samples = ranks.sum_numbers([self.loss_sum.item(), self.num_samples])
        return loss_sum / num_samples


def train_epoch(
    step: TrainStep, batches: Iterable[Any], tally: Tally, after_step: Callable[[], None] = lambda: None
) -> float:
    """Step once on each batch; return the mean loss over the epoch's samples of all ranks."""
    for batch in batches:
        loss = step(batch)
        if step.counts:
            tally.add(loss, batch_length(batch))
        after_step()
    return tally.mean(step.parallel.ranks)
