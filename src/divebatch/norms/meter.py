"""Per-sample squared gradient norms inside the one normal backward pass."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.checks import require_choice, require_count
from divebatch.errors import UsageError
from divebatch.norms.accumulators import Sums
from divebatch.norms.backward import Backward
from divebatch.norms.compilation import warn_if_compiled
from divebatch.norms.compiled_engine import Tapped, Taps
from divebatch.norms.eager_engine import Hooks
from divebatch.norms.fallback import FALLBACKS
from divebatch.norms.registry import cover
from divebatch.norms.share import current_share

LOSS_REDUCTIONS = ("mean", "sum")
MODES = ("exact", "sketch")


class NormMeter:
    """Counts sum_i ||g_i||^2 over ordinary backward passes, g_i the gradient of sample i's own, unaveraged loss.

    A sample is one entry of the batch dimension (a sequence, not a token). With `loss_reduction="mean"` every
    backward pass must be of the mean over its own batch of b samples, and the norms are multiplied by b^2; with
    `"sum"` they are taken as they come. Getting this wrong is off by b^2, silently: it is the classic error here.
    A mean over tokens gives each sequence the weight it has in your loss, times b.

    `mode="sketch"` replaces the exact norms of matrix-like weights by unbiased estimates from random signs, far
    cheaper; `every=q` measures one backward pass in q and extrapolates. `standard_error()` covers both.

    `compiled=True` is for models under `torch.compile`: make the meter first, compile (or first run) afterwards. It
    adds no graph break, and no per-sample values.

    Under train-mode BatchNorm samples have no gradients of their own; what is counted is each one's contribution to
    the batch gradient (`divebatch.norms.normalization`).

    Where ranks share a batch unevenly, `loss_weight()` is what the loss of the pass under way is multiplied with; a
    pass of weight zero counts for nothing.

    Every trainable parameter must belong to a layer with a rule, or `fallback="vmap"` is chosen; the error comes at
    construction and names them.

    >>> model = nn.Linear(3, 1)
    >>> with NormMeter(model) as meter:
    ...     model(torch.ones(4, 3)).mean().backward()
    >>> meter.per_sample(), meter.sum_of_sq_norms()  # each sample: three weights and a bias, all with gradient 1
    (tensor([4., 4., 4., 4.]), 16.0)
    """

    attached: ClassVar["weakref.WeakSet[NormMeter]"] = weakref.WeakSet()

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: str = "exact",
        every: int = 1,
        fallback: str | None = None,
        loss_reduction: str = "mean",
        compiled: bool = False,
        grad_scaler: Any = None,
        loss_weight: Callable[[], float] | None = None,
    ) -> None:
        require_choice("mode", mode, MODES)
        require_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        require_choice("fallback", fallback, (None, *FALLBACKS))
        require_count("every", every)
        self.loss_reduction, self.mode, self.every, self._grad_scaler = loss_reduction, mode, every, grad_scaler
        self._loss_weight = loss_weight or (lambda: 1.0)
        self.layers = cover(model, fallback=FALLBACKS[fallback] if fallback is not None else None)
        self.on_backward_end: Callable[[Backward | Tapped], None] | None = None
        self.last_counts: Tensor | None = None
        """With a grad scaler: whether the last pass was finite, as a tensor; None where every pass counts."""
        self._engine: Hooks | Taps
        if compiled:
            self._engine = Taps(model, self.layers, mode, self._finish)
        else:
            warn_if_compiled(model)
            self._engine = Hooks(self.layers, mode, self._finish)
        self._clock = next(p for p in model.parameters() if p.requires_grad)
        self._ticks: RemovableHandle | None = None
        self.reset()

    # Results

    def sum_of_sq_norms(self) -> float:
        """The sum since the last `reset()`, over all samples of all backward passes; synchronises with the device."""
        self._engine.check()
        return self._sums.total()

    def standard_error(self) -> float:
        """Of `sum_of_sq_norms()`: 0 where everything was measured exactly."""
        return self._sums.standard_error()

    def per_sample(self) -> Tensor | None:
        """The last measured backward pass's squared norms, one per sample; None before it, and when compiled."""
        return None if self._last is None else self._last[0] * self._last[1]

    @property
    def num_samples(self) -> int:
        """Samples of the measured backward passes since the last `reset()`."""
        return int(self._sums.num_samples)

    def reset(self) -> None:
        """Forget all sums."""
        self._sums = Sums(extrapolates=self.every > 1)
        self._last: tuple[Tensor, float | Tensor] | None = None
        self._engine.forget()
        if self in NormMeter.attached:
            self._engine.switch_on()  # the first pass from here on is measured

    def load_sums(self, total: float, num_samples: int) -> None:
        """Continue from saved sums."""
        self.reset()
        self._sums.load(total, num_samples)

    # Attaching

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Observe the layers; afterwards backward passes are counted."""
        if self in NormMeter.attached:
            raise UsageError("this NormMeter is attached already")
        self._engine.switch_on()
        if self.every > 1:
            self._ticks = self._clock.register_hook(self._tick)
        NormMeter.attached.add(self)

    def detach(self) -> None:
        """Remove all hooks; the sums stay."""
        self._engine.switch_off()
        if self._ticks is not None:
            self._ticks.remove()
        NormMeter.attached.discard(self)

    def call_at_start(self, function: Callable[[], None]) -> None:
        """Of each backward pass, before any parameter has its gradient; not for compiled models."""
        assert isinstance(self._engine, Hooks)
        self._engine.on_start = function

    @property
    def paused(self) -> bool:
        """Whether backward passes go by uncounted for the moment."""
        return self._engine.paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._engine.paused = value

    def backward_of(self, task: int) -> Backward | Tapped:
        """The backward pass with this id, as far as it has come."""
        return self._engine.backward_of(task)

    # One backward pass

    def _tick(self, _: Tensor) -> None:
        """A backward pass runs: switch on in time for the next one if that is to be measured."""
        if self.paused:
            return
        self._sums.num_steps += 1
        if self._sums.num_steps % self.every == 0:  # not before this pass is over: it may run layers again
            Variable._execution_engine.queue_callback(self._engine.switch_on)

    def _finish(self, done: Backward | Tapped) -> None:
        scale = self.gradient_scale(done) ** 2
        sq_norms, variances = done.sq_norms, done.variances
        self._last = (sq_norms, scale) if sq_norms.ndim else None
        variance = None if variances is None else _summed(variances) * scale**2
        total = _summed(sq_norms) * scale
        if self._grad_scaler is not None:  # it skips the steps that overflowed: they are in no sum
            self.last_counts = total.isfinite()
            total = torch.where(self.last_counts, total, 0.0)
            variance = None if variance is None else torch.where(self.last_counts, variance, 0.0)
        self._sums.add(total, variance, self.num_counted(done))
        if self.on_backward_end is not None:
            self.on_backward_end(done)
        if self.every > 1:
            self._keep_ticking(done)
            self._engine.switch_off()

    def _keep_ticking(self, done: Backward | Tapped) -> None:
        """A parameter that gets no gradient makes no clock: take one of a layer that was reached."""
        if self._sums.num_steps or self._ticks is None or isinstance(done, Tapped):
            return
        self._ticks.remove()
        self._clock = next(p for p in done.layers[-1].parameters if p.requires_grad)
        self._ticks = self._clock.register_hook(self._tick)
        self._sums.num_steps = 1

    def num_counted(self, done: Backward | Tapped) -> int | Tensor:
        """Samples of this pass that count: none of a stand-in's."""
        return done.num_samples if self._loss_weight() else 0

    def gradient_scale(self, done: Backward | Tapped) -> float | Tensor:
        """What turns a gradient of this pass into a sum of unaveraged per-sample gradients."""
        weight = self._loss_weight()
        if not weight:
            return 0.0
        share = current_share() * weight
        scale = done.gradient_scale(self.loss_reduction)
        factor = scale if share == 1.0 else scale / share  # each operation may be a launch
        return factor if self._grad_scaler is None else factor / _loss_scale(self._grad_scaler)


def _summed(values: Tensor) -> Tensor:
    """A single number, in float64; a compiled pass brings it as one."""
    return values.sum(dtype=torch.float64) if values.ndim else values


def _loss_scale(grad_scaler: Any) -> float | Tensor:
    """What the scaler multiplies losses with now; its tensor where it has one, which needs no synchronisation."""
    scale = getattr(grad_scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else float(grad_scaler.get_scale())


@contextmanager
def pausing_meters() -> Iterator[None]:
    """Inside, backward passes are not counted by the meters that are attached now."""
    pausing = [meter for meter in NormMeter.attached if not meter.paused]
    for meter in pausing:
        meter.paused = True
    try:
        yield
    finally:
        for meter in pausing:
            meter.paused = False
