"""Per-sample squared gradient norms, and gradient diversity, within normal backward passes."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.measurement import Diversity
from divebatch.norms.accumulators import addend, are_finite, is_at_hand, kept, plus, trainable, zero_unless
from divebatch.norms.compiled import CompiledEngine, uncompiled, warn_if_compiled
from divebatch.norms.coverage import not_called
from divebatch.norms.eager import EagerEngine, MeasuredPass
from divebatch.norms.loss_scale import LossReduction, LossScale, LossWeight, PassScale
from divebatch.norms.passes import ModuleHook
from divebatch.norms.rank_weighting import without_weighing
from divebatch.norms.registry import cover
from divebatch.norms.rules.fallback import FALLBACKS
from divebatch.norms.sharded import ShardSums, is_sharded
from divebatch.norms.sketch import sum_dtype
from divebatch.ranks import Ranks, RankShard, inside_ddp

MODES = ("exact", "sketch")

# Of the process, since `gradient_diversity` gets only a model and must pause the meters on it.
_attached: "weakref.WeakSet[NormMeter]" = weakref.WeakSet()


class NormMeter:
    """A meter of sum_i ||g_i||^2 over ordinary backward passes, g_i the gradient of sample i's own, unaveraged loss.

    A sample is one entry of the batch dimension (a sequence, not a token). With BatchNorm in training mode, samples
    have no gradients of their own; the meter then counts each sample's contribution to the batch gradient
    (`divebatch.norms.rules.normalization`).

    Attach the meter (or use it as a context manager) for the passes to measure, then read `sum_of_sq_norms()`.

    Args:
        model: The model to measure. Every trainable parameter must belong to a layer with a rule.
        mode: "exact", or "sketch" for unbiased estimates of matrix-like weights' norms from random signs, at far less
            cost; `standard_error()` gives their error.
        fallback: "vmap" measures layers without a rule by running them again for each sample. None: an error.
        loss_reduction: How the loss of each backward pass is reduced over its b samples. Norms of a "mean" are
            multiplied by b^2; a wrong value is not detected. In a mean over tokens, each sequence has its weight in
            your loss, times b.
        compiled: Whether the model is under `torch.compile`. Create the meter before the model first runs: there are no
            graph breaks, and no per-sample values.
        grad_scaler: The GradScaler that scales the losses. Passes that overflowed are not counted.
        rank_shard: A function that returns this rank's samples of the current batch, if ranks hold unequal numbers
            (`lambda: loader.rank_shard`). None: one process.

    >>> model = nn.Linear(3, 1)
    >>> with NormMeter(model) as meter:
    ...     model(torch.ones(4, 3)).mean().backward()
    >>> meter.per_sample(), meter.sum_of_sq_norms()  # each sample: three weights and a bias, all with gradient 1
    (tensor([4., 4., 4., 4.]), 16.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: Literal["exact", "sketch"] = "exact",
        fallback: Literal["vmap"] | None = None,
        loss_reduction: LossReduction = "mean",
        compiled: bool = False,
        grad_scaler: Any = None,
        rank_shard: Callable[[], RankShard] | None = None,
    ) -> None:
        require_choice("mode", mode, MODES)
        require_choice("fallback", fallback, (None, *FALLBACKS))
        self._model, self._frozen = model, dict[str, nn.Parameter]()
        self._handles: list[RemovableHandle] = []
        self._loss_scale = LossScale(loss_reduction, rank_shard=rank_shard, grad_scaler=grad_scaler)
        self._layers = cover(model, fallback=FALLBACKS[fallback] if fallback is not None else None)
        self._on_pass: Callable[[MeasuredPass, PassScale, Any, Any], None] | None = None
        """Receives each pass, its sum of squared norms, and whether it is finite (None: every pass counts)."""
        self._skips_nonfinite = grad_scaler is not None  # steps that overflowed are skipped, so they are in no sum
        self._engine: EagerEngine | CompiledEngine
        if compiled:
            self._engine = CompiledEngine(model, self._layers, mode, self._finish)
        else:
            warn_if_compiled(model)
            self._engine = EagerEngine(self._layers, mode, self._finish)
        self._is_attached = False
        self.reset()

    # Results

    def sum_of_sq_norms(self) -> float:
        """Return the sum since the last `reset()`, over all samples of all passes; synchronises with the device."""
        if isinstance(self._engine, CompiledEngine):
            self._engine.require_countable()
        return float(self._total)

    def standard_error(self) -> float:
        """Return the standard error of `sum_of_sq_norms()`; 0 if all norms are exact.

        The error comes from the same signs as the sum, so it is valid for sums over some 32 samples or more.
        """
        return math.sqrt(float(self._variance))

    def per_sample(self) -> Tensor | None:
        """Return the last pass's squared norms, one per sample; None before the first pass, or if compiled."""
        return None if self._last is None else self._last[0] * self._last[1]

    @property
    def num_samples(self) -> int:
        """The number of samples in the sum, since the last `reset()`."""
        return int(self._num_samples)

    @property
    def skipped_samples(self) -> int:
        """The number of samples in passes that were not counted because their gradients were not finite."""
        return int(self._skipped_samples)

    def reset(self) -> None:
        """Set all sums to zero."""
        self._total: Tensor | float = 0.0
        """Sum of squared norms, in float64, on the device."""
        self._variance: Tensor | float = 0.0
        self._num_samples: Tensor | int = 0
        self._skipped_samples: Tensor | int = 0
        self._last: tuple[Tensor, float | Tensor] | None = None
        self._engine.forget()

    # Attaching

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Start counting backward passes by observing the layers."""
        if self._is_attached:
            raise UsageError("this NormMeter is attached already")
        self._engine.switch_on()
        self._frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        for module in self._model.modules():
            # A compiler would have to know the hooks; there, a pass through measured layers is sufficient.
            own = [p for p in module._parameters.values() if p is not None and not p.requires_grad]
            if own and isinstance(self._engine, EagerEngine):
                self._handles.append(module.register_forward_pre_hook(ModuleHook(module, self._see_frozen)))
        self._is_attached = True
        _attached.add(self)

    def detach(self) -> None:
        """Remove all hooks; the sums stay."""
        self._engine.switch_off()
        while self._handles:
            self._handles.pop().remove()
        self._is_attached = False
        _attached.discard(self)

    # One backward pass

    def _finish(self, done: MeasuredPass) -> None:
        if self._frozen:
            self._require_frozen()
        scale = self._loss_scale.of_pass(done.weight, done.num_samples)
        sq_norms, square, is_eager = done.sq_norms, scale.factor**2, done.sq_norms.ndim > 0
        self._last = (sq_norms, square) if is_eager else None
        # In float64: an epoch adds very many squares of very different size. A compiled pass gives single numbers.
        total: Any = sq_norms.sum(dtype=torch.float64) if is_eager else sq_norms
        variances: Any = done.variances
        if is_eager and variances is not None:
            variances = variances.sum(dtype=torch.float64)
        if is_eager and is_at_hand(sq_norms):
            total, square = float(total), float(square)
            variances = None if variances is None else float(variances)
        is_finite, counted, total = None, scale.num_samples, total * square
        if variances is not None:  # of squared norms, so the scale enters with its fourth power
            variances = variances * square**2
        if self._skips_nonfinite:
            is_finite = total.isfinite() if isinstance(total, Tensor) else math.isfinite(total)
            if done.gradients:  # norms and gradients can overflow separately
                is_finite = is_finite & are_finite(list(done.gradients.values()))
            total = zero_unless(is_finite, total)
            variances = None if variances is None else zero_unless(is_finite, variances)
            counted = counted * is_finite
            self._skipped_samples = plus(self._skipped_samples, scale.num_samples - counted)
        self._total = plus(self._total, total)
        if variances is not None:
            self._variance = plus(self._variance, variances)
        self._num_samples = plus(self._num_samples, counted)
        if self._on_pass is not None:
            self._on_pass(done, scale, total, is_finite)

    def _see_frozen(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._require_frozen()

    def _require_frozen(self) -> None:
        """Raise if a parameter that was frozen when measuring began trains now."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise CoverageError(
                    f"parameter '{name}' was frozen when measuring began and is trained now: its gradients are missing",
                    "unfreeze it before the epoch begins, even if the loop freezes it for a part of the epoch",
                )


@contextmanager
def pausing_meters() -> Iterator[None]:
    """Pause all meters that are counting now, for this context."""
    # Only those that count now, so that a pause within a pause does not end the outer one.
    pausing = [meter._engine for meter in _attached if not meter._engine.paused]
    for engine in pausing:
        engine.paused = True
    try:
        yield
    finally:
        for engine in pausing:
            engine.paused = False


@dataclass(frozen=True, slots=True)
class PassSums:
    """Both sums of one backward pass, on the device."""

    sum_of_sq_norms: Tensor | float
    sq_norm_of_sum: Tensor
    num_samples: int | Tensor
    """The pass's samples; 0 for a pass of weight zero."""
    is_finite: Tensor | bool | None
    """Whether the gradients are finite, so that the pass counts; None: every pass counts."""


class DiversityMeter:
    """A meter of the sums of ||g_i||^2 and of g_i over backward passes, in any loop; read with `diversity()`.

    Parameter hooks give each backward pass's own gradient, so gradient accumulation, clipping and `zero_grad` do not
    matter. The sum costs one copy of the trainable parameters. A pass that fails half-way is in neither sum.

    If `ranks` train together, reading is a collective: gradient vectors are added over ranks and then squared. FSDP2's
    shards stay shards: each rank sums and squares its own pieces.

    Args:
        model: The model to measure; norm rules must cover all its trainable parameters, as for `NormMeter`.
        ranks: The processes that train together. None: this one alone.
        rank_shard: A function that returns this rank's samples of the loader's latest batch. None: there is no loader.
        delivered: A function that returns the number of samples delivered to this rank so far. None: there is no
            loader. With both functions, each pass must go once through the samples of its batch or micro-batch.
        on_pass: A function that receives both sums of each backward pass. The gradient sum then restarts in each pass.
        skip_nonfinite: Whether to leave out passes whose gradients are not all finite, and count them apart. Under a
            GradScaler this is always so. Not possible for parameters sharded by FSDP2.
        settings: Further arguments of `NormMeter`: mode, fallback, loss_reduction, compiled, grad_scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: Ranks | None = None,
        rank_shard: Callable[[], RankShard] | None = None,
        delivered: Callable[[], int] | None = None,
        on_pass: Callable[[PassSums], None] | None = None,
        skip_nonfinite: bool = False,
        **settings: Any,
    ) -> None:
        self._model, self._skips_nonfinite = model, skip_nonfinite
        self._settings = {"rank_shard": rank_shard, **settings}
        self._ranks, self._on_pass, self._delivered = ranks or Ranks.alone(), on_pass, delivered
        self._handles: list[RemovableHandle] = []
        self._token = object()
        self._sums: dict[str, Tensor] = {}
        self._unit: Tensor | None = None
        """The factor for the sums when they are read; None if it has always been 1."""
        self._shards: ShardSums | None = None
        self._cover()

    def _cover(self) -> None:
        self.norms = NormMeter(self._model, **self._settings)
        self.norms._on_pass = self._add
        self._parameters = trainable(self._model)
        self._is_sharded = any(map(is_sharded, self._parameters.values()))
        if self._is_sharded:
            self._require_can_be_sharded()
        elif self._skips_nonfinite:
            self.norms._skips_nonfinite = True

    def attach(self) -> None:
        """Start counting from zero, for the parameters that are trainable now."""
        if self._parameters.keys() != trainable(self._model).keys():
            self._cover()
        self.norms.attach()
        self.reset()
        for name in self._sums:
            # A hook sees the pass's own gradient; `.grad` may include earlier passes, or be clipped or scaled.
            hook = partial(self.norms._engine.take_gradient, name)
            self._handles.append(self._parameters[name].register_hook(hook))

    def detach(self) -> None:
        """Stop counting and free the sums."""
        self.norms.detach()
        while self._handles:
            self._handles.pop().remove()
        self._sums, self._unit = {}, None
        self._drop_shards()

    @property
    def is_attached(self) -> bool:
        """Whether backward passes are counted."""
        return self.norms._is_attached

    def reset(self) -> None:
        """Set the sums to zero without changing the hooks."""
        self.norms.reset()
        self._token = object()
        plain = {name: p for name, p in self._parameters.items() if not is_sharded(p)}
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in plain.items()}
        self._unit = None
        self._loaded = 0
        """The number of samples in passes before a resume."""
        self._seen, self._before = 0, self._delivered() if self._delivered is not None else 0
        """Samples in eager passes, and samples delivered before them."""
        self._drop_shards()
        if self._is_sharded:
            assert isinstance(self.norms._engine, EagerEngine)
            self._shards = ShardSums(self._parameters, self.norms._loss_scale.of_mean_over_ranks)
            self._reached: set[int] = set()
            """Layers with shards that a pass has reached."""
            self.norms._engine.on_start = self._shards.begin

    def _drop_shards(self) -> None:
        if self._shards is not None:
            self._shards.detach()
        self._shards = None

    @property
    def token(self) -> object:
        """An object that changes when the sums restart: recorded passes that add to the old sums are then invalid.

        None until the first pass, which is checked separately, is complete.
        """
        return self._token if self.norms._engine.is_checked else None

    def diversity(self) -> Diversity:
        """Return the diversity from both sums since the last reset."""
        if not self.is_attached:
            raise UsageError("this DiversityMeter is not attached: read diversity() before detaching")
        if self._shards is not None:  # their gradients may arrive after the pass
            self._require_reached(self._shards.received)
        self._require_delivered(self.norms.num_samples + self.norms.skipped_samples - self._loaded)
        self._multiply_out()
        whole = self._ranks.sq_norm_of_sum(list(self._sums.values()))
        pieces = self._shards.sq_norm() if self._shards is not None else 0.0
        sq_norms, num_samples, skipped, of_pieces = self._ranks.sum_numbers([*self._numbers(), pieces])
        return Diversity(sq_norms, whole + of_pieces, round(num_samples), skipped_samples=round(skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums over all ranks, for a checkpoint in a measured epoch; any number of ranks can continue."""
        sq_norms, num_samples, skipped = self._ranks.sum_numbers(self._numbers())
        self._multiply_out()
        sums = {name: total.clone() for name, total in self._sums.items()}
        # The sums of all ranks, so that the number of ranks may change on resuming; only FSDP2's shards stay in shards.
        self._ranks.sum_(list(sums.values()))
        if self._shards is not None:
            sums |= self._shards.state_dict()
        return {
            "sum_of_sq_norms": sq_norms,
            "num_samples": round(num_samples),
            "skipped_samples": round(skipped),
            "gradient_sums": sums,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums; only the first rank takes them over."""
        self.reset()
        if self._shards is not None:
            self._shards.load_state_dict(state["gradient_sums"])
        # The saved sums are those of all ranks: taken over once, any number of ranks can continue from them.
        if not self._ranks.is_first:
            return
        for name, total in self._sums.items():
            total.copy_(state["gradient_sums"][name])
        norms = self.norms
        norms._total, norms._num_samples = state["sum_of_sq_norms"], state["num_samples"]
        norms._skipped_samples = state["skipped_samples"]
        self._loaded = state["num_samples"] + state["skipped_samples"]

    def _numbers(self) -> list[float]:
        """Return this rank's sum of squared norms, its samples, and the samples left out."""
        return [self.norms.sum_of_sq_norms(), float(self.norms.num_samples), float(self.norms.skipped_samples)]

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _add(
        self,
        done: MeasuredPass,
        scale: PassScale,
        sum_of_sq_norms: Tensor | float,
        is_finite: Tensor | bool | None,
    ) -> None:
        """Add the gradients of a pass that has ended."""
        if self._shards is not None:
            self._reached |= {id(layer.module) for layer in done.layers}
        counts = isinstance(scale.num_samples, Tensor) or scale.num_samples > 0
        if self._delivered is not None and done.size is not None and counts:
            self._check_size(done.size, done.weight)
        sums, gradients = [], []
        for name, gradient in done.gradients.items():
            total = self._sums[name]
            sums.append(total)
            is_plain = gradient.dtype == total.dtype and not gradient.is_sparse
            gradients.append(gradient if is_plain else addend(gradient, total))
        if isinstance(is_finite, Tensor) and is_finite.device.type != "cpu":
            gradients = kept(gradients, is_finite)
        elif is_finite is not None and not is_finite:  # on the CPU, where reading does not wait
            sums, gradients = [], []
        factor = scale.factor
        if isinstance(factor, Tensor) and sums:
            self._count_in(factor)
            torch._foreach_add_(sums, gradients)
        elif not isinstance(factor, Tensor) and factor and sums:
            self._multiply_out()
            torch._foreach_add_(sums, gradients, alpha=factor)
        if self._on_pass is not None:
            self._multiply_out()
            every = list(self._sums.values())
            sq_norm = torch.stack(torch._foreach_norm(every)).double().square().sum()
            self._on_pass(PassSums(sum_of_sq_norms, sq_norm, scale.num_samples, is_finite))
            torch._foreach_zero_(every)

    def _count_in(self, unit: Tensor) -> None:
        """Keep the sums as multiples of `unit` from here on, so that gradients are added unscaled.

        A compiled pass has its scale on the device, and multiplying each gradient would take the host too long.
        """
        if self._unit is None:
            self._unit = torch.ones_like(unit)
        sums = list(self._sums.values())
        torch._foreach_mul_(sums, (self._unit / unit).to(sums[0].dtype))
        self._unit.copy_(unit)

    def _multiply_out(self) -> None:
        """Multiply the sums by their unit, for a reader."""
        if self._unit is not None:
            self._count_in(torch.ones_like(self._unit))

    def _check_size(self, num_samples: int, weight: LossWeight | None) -> None:
        """Raise unless a pass went once through each sample of its batch or micro-batch.

        Compiled passes count samples on the device: after the first pass, only their sum is checked, at the end.
        """
        self._seen += num_samples
        waiting = self._require_delivered(self._seen) - self._seen + num_samples
        rank_shard = self.norms._loss_scale.rank_shard
        shard = waiting if rank_shard is None else rank_shard().mine
        of_weight = None if weight is None else weight.num_samples
        expected = shard if of_weight is None else of_weight
        if num_samples not in (expected, waiting - shard):  # the latter if the loop prefetches one batch
            raise CoverageError(
                f"a measured backward pass went through {num_samples} samples, and its "
                f"{'batch' if of_weight is None else 'micro-batch'} has {expected}: the model sees other entries than "
                f"samples (views, time steps), or the loss of a micro-batch was not multiplied by its weight",
                "give the model one entry a sample, batch dimension first, and write (loss_fn(model(x), y) * "
                "weight).backward() for each part of micro_batches(...)",
            )

    def _require_delivered(self, seen: int) -> int:
        """Return the samples delivered; raise if `seen` samples in measured passes cannot come from them."""
        delivered = seen if self._delivered is None else self._delivered() - self._before
        if seen <= delivered:
            return delivered
        raise CoverageError(
            f"{seen} samples went through measured backward passes, but the loader delivered {delivered}: a batch "
            f"had a second backward pass, or the model sees several entries of a sample (views, time steps)",
            "call backward() once a batch, on the sum of its losses",
        )

    def _require_reached(self, received: Iterable[str]) -> None:
        layers = [layer for layer in self.norms._layers if id(layer.module) in self._reached]
        counted = {id(p) for layer in layers for p in layer.parameters}
        missed = [name for name in received if id(self._parameters[name]) not in counted]
        if missed:
            raise not_called(missed)

    def _require_can_be_sharded(self) -> None:
        refused = [key for key in ("compiled", "grad_scaler") if self._settings.get(key)]
        if self.norms._loss_scale.rank_shard is None:
            refused.append("a meter without a loader")
        refused += [layer.place for layer in self.norms._layers if layer.entry.reruns]
        if refused:
            raise CoverageError(f"parameters sharded by FSDP2 cannot be measured with: {', '.join(refused)}")


def gradient_diversity(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    loss_reduction: LossReduction = "mean",
    fallback: Literal["vmap"] | None = None,
    ranks: Ranks | None = None,
    skip_nonfinite: bool = False,
) -> Diversity:
    """Measure the exact gradient diversity of the samples in `batches`, at the model's current weights.

    The model runs uncompiled in its current mode. Its weights, gradients, buffers and random state do not change.

    Args:
        model: The model, with or without DistributedDataParallel.
        loss_fn: A function that returns the loss of a batch, `loss_fn(model(inputs), targets)`.
        batches: Any number of pairs `(inputs, targets)`.
        loss_reduction: How `loss_fn` reduces over the samples of a batch, "mean" or "sum".
        fallback: "vmap" measures layers without a norm rule, as in `NormMeter`.
        ranks: The processes that each pass their own batches (`loader.full_pass()`); the result is for all of them.
        skip_nonfinite: Whether to leave out batches whose gradients are not all finite (`skipped_samples` counts them).
            Otherwise one such batch makes the diversity undefined.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))]
    >>> gradient_diversity(model, lambda out, _: out.mean(), data)  # gradients 1 and 3: (1 + 9) / (1 + 3)^2
    Diversity(sum_of_sq_norms=10.0, sq_norm_of_sum=16.0, num_samples=2)
    """
    model = uncompiled(inside_ddp(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    meter = DiversityMeter(
        model, ranks=ranks, loss_reduction=loss_reduction, fallback=fallback, skip_nonfinite=skip_nonfinite
    )
    with pausing_meters(), without_weighing(model), _left_as_found(model), torch.enable_grad(), meter:
        for inputs, targets in map(batch_pair, batches):
            # grad(), not backward(), which would change the parameters' own .grad.
            torch.autograd.grad(loss_fn(model(inputs), targets), parameters, allow_unused=True)
        if meter.norms.num_samples + meter.norms.skipped_samples == 0:
            raise ArgumentError("gradient_diversity was given no batches")
        return meter.diversity()


def batch_pair(batch: Any) -> tuple[Any, Any]:
    """Return the batch if it is a pair; raise otherwise."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ArgumentError(f"batches must be pairs (inputs, targets), got {type(batch).__name__}{length}")
    return batch[0], batch[1]


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore buffers (BatchNorm statistics) and the random state (dropout) when the context ends."""
    found = [(m, key, b, b.clone()) for m in model.modules() for key, b in m._buffers.items() if b is not None]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, key, buffer, before in found:
                    module._buffers[key] = buffer.copy_(before)
