"""Per-sample squared gradient norms inside the one normal backward pass."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from divebatch.checks import require_choice
from divebatch.errors import UsageError
from divebatch.norms.accumulators import plus
from divebatch.norms.backward import Backward
from divebatch.norms.compilation import warn_if_compiled
from divebatch.norms.compiled_engine import Tapped, Taps
from divebatch.norms.eager_engine import Hooks
from divebatch.norms.fallback import FALLBACKS
from divebatch.norms.frozen import FrozenParameters
from divebatch.norms.loss_scale import LossReduction, LossScale, PassScale
from divebatch.norms.registry import CoveredLayer, cover
from divebatch.ranks import RankShard

MODES = ("exact", "sketch")

# Of the process, since a function that is given a model alone, as `gradient_diversity` is, must pause the meters on it.
_attached: "weakref.WeakSet[NormMeter]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class CountedPass:
    """A backward pass that a meter has counted."""

    layers: Sequence[CoveredLayer]
    """Layers that the pass reached."""
    scale: PassScale
    sum_of_sq_norms: Tensor
    """Over its samples, of their own gradients; in float64."""
    is_finite: Tensor | None
    """Whether its gradients are finite numbers, and so count; None where every pass counts."""


class NormMeter:
    """Counts sum_i ||g_i||^2 over ordinary backward passes, g_i the gradient of sample i's own, unaveraged loss.

    A sample is one entry of the batch dimension (a sequence, not a token). Under train-mode BatchNorm samples have no
    gradients of their own; what is counted is each one's contribution to the batch gradient
    (`divebatch.norms.normalization`).

    Attach the meter (or use it as a context manager) for the passes you want to measure, then read `sum_of_sq_norms()`.

    Args:
        model: every trainable parameter of it must belong to a layer with a rule; the error names those that do not.
        mode: "exact", or "sketch", which replaces the exact norms of matrix-like weights by unbiased estimates from
            random signs, at far less cost. `standard_error()` says how far off they are.
        fallback: "vmap" measures layers without a rule by running them again, sample by sample; None refuses them.
        loss_reduction: how the loss of each backward pass is reduced over its own b samples. Norms of a "mean" are
            multiplied by b^2, those of a "sum" are taken as they are. A wrong value here is off by b^2 and shows
            nowhere. A mean over tokens gives each sequence the weight it has in your loss, times b.
        compiled: for models under `torch.compile`. Make the meter first and compile (or first run) afterwards: it
            breaks no graph, and has no per-sample values.
        grad_scaler: the GradScaler that scales the losses, whose scale is divided out. Passes that overflowed count
            for nothing.
        rank_shard: gives this rank's samples of the batch under way, where ranks train together and hold unequally
            many (`lambda: loader.rank_shard`); None for one process.

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
        self._loss_scale = LossScale(loss_reduction, rank_shard=rank_shard, grad_scaler=grad_scaler)
        self._layers = cover(model, fallback=FALLBACKS[fallback] if fallback is not None else None)
        self._on_pass: Callable[[CountedPass], None] | None = None
        self._skips_nonfinite = grad_scaler is not None  # it skips the steps that overflowed: they are in no sum
        self._gradients_are_finite: Callable[[], Tensor | None] = lambda: None
        """Says so of the pass that has just ended; None where nobody holds its gradients."""
        self._engine: Hooks | Taps
        self._frozen, self._is_compiled = FrozenParameters(model), compiled
        if compiled:
            self._engine = Taps(model, self._layers, mode, self._finish)
        else:
            warn_if_compiled(model)
            self._engine = Hooks(self._layers, mode, self._finish)
        self._is_attached = False
        self.reset()

    # Results

    def sum_of_sq_norms(self) -> float:
        """The sum since the last `reset()`, over all samples of all backward passes; synchronises with the device."""
        self._engine.check()
        return float(self._total)

    def standard_error(self) -> float:
        """The standard error of `sum_of_sq_norms()`: 0 where everything was measured exactly.

        It comes from the same signs as the sum, so it is for sums over some 32 samples or more. Over 8 of them 1.96
        standard errors held the exact sum in 90 % of the draws, over 2 in 78 % (`benchmarks/coverage.py`).
        """
        return math.sqrt(float(self._variance))

    def per_sample(self) -> Tensor | None:
        """The last backward pass's squared norms, one per sample; None before it, and when compiled."""
        return None if self._last is None else self._last[0] * self._last[1]

    @property
    def num_samples(self) -> int:
        """Samples of the measured backward passes since the last `reset()`: those in the sum."""
        return int(self._num_samples)

    @property
    def skipped_samples(self) -> int:
        """Samples of passes that count for nothing, since their gradients were not finite."""
        return int(self._skipped_samples)

    def reset(self) -> None:
        """Forget all sums."""
        self._total: Tensor | float = 0.0
        """Sum of squared norms, in float64, where it was computed."""
        self._variance: Tensor | float = 0.0
        """Variance of that, from the sketches."""
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
        """Observe the layers; afterwards backward passes are counted."""
        if self._is_attached:
            raise UsageError("this NormMeter is attached already")
        self._engine.switch_on()
        self._frozen.begin(hooks=not self._is_compiled)
        self._is_attached = True
        _attached.add(self)

    def detach(self) -> None:
        """Remove all hooks; the sums stay."""
        self._engine.switch_off()
        self._frozen.end()
        self._is_attached = False
        _attached.discard(self)

    # What a DiversityMeter needs to know

    def _load(self, total: float, num_samples: int, skipped_samples: int = 0) -> None:
        """Continue from saved sums."""
        self.reset()
        self._total, self._num_samples, self._skipped_samples = total, num_samples, skipped_samples

    def _call_at_start(self, function: Callable[[], None]) -> None:
        """Call it in each backward pass before any parameter has its gradient; not for compiled models."""
        assert isinstance(self._engine, Hooks)
        self._engine.on_start = function

    def _layers_reached(self, task: int) -> Sequence[CoveredLayer]:
        """Layers that the backward pass with this number has come to so far."""
        return self._engine.backward_of(task).layers

    @property
    def _is_paused(self) -> bool:
        """Whether backward passes go by uncounted for the moment."""
        return self._engine.paused

    # One backward pass

    def _finish(self, done: Backward | Tapped) -> None:
        self._frozen.check()
        scale = self._loss_scale.of_pass(done.weight, done.num_samples)
        sq_norms, variances, square = done.sq_norms, done.variances, scale.factor**2
        self._last = (sq_norms, square) if sq_norms.ndim else None
        total = _summed(sq_norms) * square
        # The variance of squared norms: the scale enters with its fourth power.
        variance = None if variances is None else _summed(variances) * square**2
        counted, is_finite = scale.num_samples, None
        if self._skips_nonfinite:
            is_finite = self._is_finite(total)
            total = torch.where(is_finite, total, 0.0)
            variance = None if variance is None else torch.where(is_finite, variance, 0.0)
            counted = counted * is_finite
            self._skipped_samples = plus(self._skipped_samples, scale.num_samples - counted)
        self._total = plus(self._total, total)
        if variance is not None:
            self._variance = plus(self._variance, variance)
        self._num_samples = plus(self._num_samples, counted)
        if self._on_pass is not None:
            self._on_pass(CountedPass(done.layers, scale, total, is_finite))

    def _is_finite(self, total: Tensor) -> Tensor:
        """Whether the norms and, where they are at hand, the gradients are: either can overflow by itself."""
        of_gradients = self._gradients_are_finite()
        return total.isfinite() if of_gradients is None else total.isfinite() & of_gradients


def _summed(values: Tensor) -> Tensor:
    """A single number, in float64; a compiled pass brings it as one."""
    # In float64: an epoch adds up very many squares of very different size.
    return values.sum(dtype=torch.float64) if values.ndim else values


@contextmanager
def pausing_meters() -> Iterator[None]:
    """Inside, backward passes are not counted by the meters that are attached now."""
    # Only those that run now, so that a pause within a pause does not end the outer one.
    pausing = [meter._engine for meter in _attached if not meter._engine.paused]
    for engine in pausing:
        engine.paused = True
    try:
        yield
    finally:
        for engine in pausing:
            engine.paused = False
