"""Unbiased estimates from the chunks of a batch, cut by micro-batches or by ranks."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.average import (
    AveragedEstimator,
    Norms,
    PairAverage,
    StepEstimate,
    inner_variance,
    norms_of,
    read,
    unbiased,
)
from divebatch.estimators.estimator import TrainingContext
from divebatch.estimators.second_moment import Preconditioner, require_second_moment, rescaled
from divebatch.estimators.step_hooks import UnchangedGradients, is_recorded, scale_of_gradients
from divebatch.measurement import StepEvent
from divebatch.norms.accumulators import addend, trainable
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.passes import BackwardPass, current_pass
from divebatch.norms.sketch import sum_dtype

HOW_TO_CUT = (
    "cut each batch into two or more: for (x, y), weight in divebatch.micro_batches(batch, size): "
    "(loss_fn(model(x), y) * weight).backward()"
)


class _Chunked(AveragedEstimator):
    """An estimator that compares the backward passes between two optimizer steps, as chunks of one batch."""

    nothing_seen = f"the epoch has ended, and no batch in it went through in two or more backward passes; {HOW_TO_CUT}"

    def __init__(self, *, decay: float, every_steps: int = 1, grad_scaler: Any) -> None:
        super().__init__(decay=decay, every_steps=every_steps)
        self._grad_scaler = grad_scaler

    def _prepare(self, context: TrainingContext) -> None:
        if context.loss_reduction != "mean":
            raise ArgumentError(
                f"{self.name} needs a loss that is a mean over samples, got loss_reduction={context.loss_reduction!r}; "
                f"'moments' and 'per-sample' take sums"
            )
        self._optimizers = [context.require_optimizer(self.name), *context.other_optimizers]

    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        self._parameters = trainable(context.model)
        self._delivered = self._chunked = 0
        """Samples delivered to this rank by the last step, and samples of chunks, since measuring began."""
        self._handles: list[RemovableHandle] = []
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(partial(self._receive, name)))
            # Fires for backward(), not for autograd.grad(): gradients read in between are not part of training.
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _receive(self, name: str, gradient: Tensor) -> None:
        if self._is_looking() and not is_recorded(gradient):
            current_pass().notes.setdefault(self, {})[name] = gradient.detach()

    def _accumulated(self, parameter: Tensor) -> None:
        if self._is_looking() and not is_recorded(parameter):
            current_pass().at_end(self._end_of_pass)

    def _end_of_pass(self, over: BackwardPass) -> None:
        if self._handles:
            weight = LossWeight(1.0) if over.weight is None else over.weight
            self._take(over.notes.get(self, {}), weight, applied=float(weight))

    @property
    def replay_token(self) -> object:
        return True

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        if self._average is not None and self._is_looking():
            own = {name: gradients[name] for name in self._parameters if name in gradients}
            self._take(own, weight, applied=1.0)

    def _is_looking(self) -> bool:
        """Return whether the current batch is measured."""
        return True

    def _take(self, gradients: Mapping[str, Tensor], weight: LossWeight, *, applied: float) -> None:
        shard = self.context.loader.rank_shard
        rank_weight = shard.weight_for("mean")
        if not rank_weight or not weight:  # a dummy's
            return
        size = shard.mine if weight.num_samples is None else weight.num_samples
        self._chunked += size
        is_scaled = getattr(self._grad_scaler, "_scale", None) is not None  # the scaler was used before
        loss_scale = float(self._grad_scaler.get_scale()) if is_scaled else 1.0
        self._add(gradients, size, float(weight), 1 / (applied * rank_weight * loss_scale))

    @abstractmethod
    def _add(self, gradients: Mapping[str, Tensor], num_samples: int, weight: float, scale: float) -> None:
        """Add a chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`."""

    def on_step(self, event: StepEvent, optimizer: Optimizer) -> None:
        self._delivered += event.local_samples
        if self._chunked > self._delivered:
            raise UsageError(
                f"the backward passes since measuring began held {self._chunked} samples by the loader's count, and "
                f"it delivered {self._delivered}: {HOW_TO_CUT}"
            )

    def _require_whole_batches(self, num_chunks: int) -> None:
        # The chunks of half a batch belong to one rank, and a state must be that of all ranks.
        if num_chunks and not self.context.loader.ranks.is_alone:
            raise UsageError("ranks that share a batch save their state after an optimizer step, not within one")


def numbers_of_chunks(values: Sequence[float], *, sizes: Sequence[int], factors: Sequence[float]) -> tuple[float, ...]:
    """Return weight, tr(Sigma), ||G||^2 and Var_i<g_i, g> from chunks of samples at the same weights.

    Args:
        values: Squared norms of each chunk's gradients, of the sum of gradients over all samples, and of the sum before
            the last of three or more chunks.
        sizes: Samples of each chunk.
        factors: Factors that turn each chunk's squared norm into that of its mean gradient.
    """
    count, total = len(sizes), sum(sizes)
    of_chunks = [factor * square for factor, square in zip(factors, values[:count], strict=True)]
    mean, last = values[count] / total**2, sizes[-1]
    weighted = sum(size * square for size, square in zip(sizes, of_chunks, strict=True))
    before = sizes[0] ** 2 * of_chunks[0] if count == 2 else values[count + 1]
    rest = total - last
    inner = inner_variance((before / rest**2, of_chunks[-1]), (rest, last), mean)
    return (total, *unbiased(weighted, mean, count, total), inner)


class GradientSums:
    """Sums of chunk gradients, in one copy of the trainable parameters.

    With an `optimizer`, gradients are first divided by the root of its second moment, as before the first of the
    compared chunks. This costs a second copy.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, optimizer: Optimizer | None = None) -> None:
        self._preconditioner = Preconditioner(optimizer, parameters) if optimizer is not None else None
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in parameters.items()}
        self.sizes: list[int] = []
        """Samples of each chunk so far."""
        self.forget()

    def forget(self) -> None:
        """Drop all chunks."""
        self.sizes = []
        self._factors: list[float] = []
        self._norms: list[Norms] = []
        self._before_last: Norms | None = None
        """Norms of the sum before the last chunk, if that sum held more than the first chunk."""
        self._scales: dict[str, Tensor] | None = None
        torch._foreach_zero_(list(self._sums.values()))

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """Add a chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`.

        Before an optimizer's first step there is no divisor, and the chunk is left out. A chunk without samples, from
        an epoch that was left early and starts again, is left out too.
        """
        if num_samples == 0:
            return
        if self._preconditioner is not None:
            # All compared chunks use the divisor of the first one: another divisor would look like noise.
            self._scales = self._scales or self._preconditioner.scales()
            if self._scales is None:
                return
            gradients = rescaled(gradients, self._scales)
        sums = [self._sums[name] for name in gradients]
        plain = [addend(gradient, total) for gradient, total in zip(gradients.values(), sums, strict=True)]
        # Two chunks should not cost more than necessary.
        self._before_last = norms_of(list(self._sums.values())) if len(self.sizes) > 1 else None
        self.sizes.append(num_samples)
        self._factors.append(scale**2)
        self._norms.append(norms_of(plain))
        torch._foreach_add_(sums, plain, alpha=num_samples * scale)

    def estimate(self) -> StepEstimate:
        """Return the estimate from two or more chunks."""
        parts = [*self._norms, norms_of(list(self._sums.values()))]
        parts += [] if self._before_last is None else [self._before_last]
        return StepEstimate(parts, partial(numbers_of_chunks, sizes=self.sizes, factors=self._factors))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of chunks that wait for further ones."""
        squares = [factor * each for factor, each in zip(self._factors, read(self._norms), strict=True)]
        return {
            "sizes": list(self.sizes),
            "sq_norms": squares,
            "before_last": None if self._before_last is None else read([self._before_last])[0],
            "sums": {name: total.clone() for name, total in self._sums.items()} if self.sizes else {},
            "scales": {name: each.clone() for name, each in self._scales.items()} if self._scales else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved sums."""
        self.forget()
        self.sizes, self._norms = list(state["sizes"]), list(state["sq_norms"])
        # The saved squares already include their factors.
        self._factors, self._before_last = [1.0] * len(self._norms), state["before_last"]
        for name, total in state["sums"].items():
            self._sums[name].copy_(total)
        if state["scales"] is not None:
            self._scales = {name: each.to(self._sums[name]) for name, each in state["scales"].items()}


class Split(_Chunked):
    """An estimator that compares chunks of one batch at the same weights: their common part is signal, the rest noise.

    The chunks are the backward passes between two optimizer steps. So gradient accumulation is sufficient: over several
    batches of the loader, or over parts of one from `divebatch.micro_batches`. The loss must be a mean over samples.

    Bias: none, with chunks of any sizes. With BatchNorm the estimate is right for the network as it trains, normalised
    over one chunk at a time. Cost: one copy of the trainable parameters, and more backward passes if batches would
    otherwise not be cut. No layer needs a rule. If a GradScaler skips a step, its batch and the next are left out.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them, each coordinate divided by the
            root of its running second moment.
        every_steps: Measure only every Nth batch, starting with the first. The others may be processed whole;
            `control.plan().min_micro_batches` says for each batch whether it must be cut.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses. None: there is none.
    """

    name = "split"
    has_inner_variance = True
    min_micro_batches = 2

    def __init__(
        self, *, decay: float = 1.0, preconditioned: bool = False, every_steps: int = 1, grad_scaler: Any = None
    ) -> None:
        super().__init__(decay=decay, every_steps=every_steps, grad_scaler=grad_scaler)
        require_choice("preconditioned", preconditioned, (True, False))
        self._preconditioned = preconditioned
        self._num_batches = 0

    def _prepare(self, context: TrainingContext) -> None:
        super()._prepare(context)
        if self._preconditioned:
            require_second_moment(context.require_one_optimizer("preconditioned=True", self.name))
        self.min_batch_size = context.loader.ranks.size + 1  # one rank must have two samples to compare

    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        super()._attach(context, average)
        self._sums = GradientSums(self._parameters, optimizer=context.optimizer if self._preconditioned else None)
        self._count_batches(0)

    def _detach(self) -> None:
        super()._detach()
        del self._sums

    def _count_batches(self, number: int) -> None:
        self._num_batches = number
        self.min_micro_batches = 2 if self._is_looking() else 1

    def _is_looking(self) -> bool:
        return self._num_batches % self._every_steps == 0

    def _add(self, gradients: Mapping[str, Tensor], num_samples: int, weight: float, scale: float) -> None:
        self._sums.add(gradients, num_samples, scale=scale)

    def on_step(self, event: StepEvent, optimizer: Optimizer) -> None:
        super().on_step(event, optimizer)
        average, sizes = self._at_work(), self._sums.sizes
        if not self._is_looking():
            average.num_samples = average.num_samples + event.local_samples
            self._count_batches(self._num_batches + bool(event.samples))
        elif sizes:
            average.num_samples = average.num_samples + sum(sizes)
            if len(sizes) > 1:  # else the next batch is measured instead
                average.add_step(self._sums.estimate())
                self._count_batches(self._num_batches + 1)
        if sizes:
            self._sums.forget()

    def state_dict(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        self._require_whole_batches(len(self._sums.sizes))
        return {**super().state_dict(), "chunks": self._sums.state_dict(), "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._sums.load_state_dict(state["chunks"])
        self._count_batches(state["num_batches"])


def _numbers_of_ranks(values: Sequence[float]) -> tuple[float, ...]:
    """Return weight, tr(Sigma) and ||G||^2 from values added over ranks.

    The values are the sum of s_j ||g_j||^2, the squared norm of the optimizer's gradient, chunks, samples, and the
    squared sum of the weights in the optimizer's gradient.
    """
    weighted, mean, chunks, samples, sq_weights = values
    if chunks < 2:
        return 0.0, 0.0, 0.0
    return (samples, *unbiased(weighted, mean / sq_weights, chunks, samples))


class AcrossRanks(_Chunked):
    """An estimator that compares ranks and micro-batches as chunks of one batch: their common part is signal.

    Each rank squares its own gradient before DDP averages it, and rank 0 also squares the average that the optimizer
    gets. These few numbers are added over ranks once an epoch, or every 512 steps. The loss must be a mean over
    samples. In a single process the chunks are its micro-batches, as in `split`.

    Bias: none, with chunks of any sizes. Cost: two norms a step, without a copy of the parameters. k chunks scatter as
    much as a batch of k samples. Gradients must reach the optimizer unchanged: with clipping, use `split`. If a
    GradScaler skips a step, its batch and the next are left out.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses. None: there is none.
    """

    name = "ranks"
    sees_all_ranks = True
    min_micro_batches = 2

    def __init__(self, *, decay: float = 1.0, grad_scaler: Any = None) -> None:
        super().__init__(decay=decay, grad_scaler=grad_scaler)

    def _prepare(self, context: TrainingContext) -> None:
        super()._prepare(context)
        self._ranks_here = context.loader.ranks
        self.min_micro_batches = 2 if self._ranks_here.is_alone else 1
        self.min_batch_size = max(2, self._ranks_here.size)  # one sample for each of two or more chunks
        self._unchanged = UnchangedGradients(self._optimizers)

    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        super()._attach(context, average)
        average.shards = context.loader.ranks
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._weighted: list[Tensor] = []
        """s_j ||g_j||^2 of each chunk so far."""
        self._num_samples, self._sum_of_weights = 0, 0.0

    def _add(self, gradients: Mapping[str, Tensor], num_samples: int, weight: float, scale: float) -> None:
        self._weighted.append(num_samples * scale**2 * _sq_norm(list(gradients.values())))
        self._num_samples += num_samples
        self._sum_of_weights += weight

    def on_step(self, event: StepEvent, optimizer: Optimizer) -> None:
        super().on_step(event, optimizer)
        if not event.samples:
            self._unchanged.later(optimizer)
            return
        average = self._at_work()
        average.num_samples = average.num_samples + event.samples
        # The mean is the same on all ranks: only the first rank adds it, so that it counts once.
        is_first, grad_scale = self._ranks_here.is_first, scale_of_gradients(optimizer)
        used = [p.grad for p in self._parameters.values() if p.grad is not None] if is_first else []
        parts: list[Norms] = [
            torch.stack(self._weighted).sum() if self._weighted else 0.0,
            _sq_norm(used) / grad_scale**2 if used else 0.0,
            float(len(self._weighted)),
            float(self._num_samples),
            self._sum_of_weights**2 if is_first else 0.0,
        ]
        average.add_step(StepEstimate(parts, _numbers_of_ranks))
        self._begin_batch()
        self._unchanged.first(optimizer)

    def state_dict(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        self._require_whole_batches(len(self._weighted))
        return {
            **super().state_dict(),
            "weighted": [*map(float, self._weighted)],
            "num_samples": self._num_samples,
            "sum_of_weights": self._sum_of_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        device = next(iter(self._parameters.values())).device
        self._weighted = [torch.tensor(each, dtype=torch.float64, device=device) for each in state["weighted"]]
        self._num_samples, self._sum_of_weights = state["num_samples"], state["sum_of_weights"]


def _sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the squared norm of all tensors as one vector, in float64; 0 if there are none."""
    norms = norms_of([tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors])
    return norms.double().square().sum() if isinstance(norms, Tensor) else torch.zeros((), dtype=torch.float64)
