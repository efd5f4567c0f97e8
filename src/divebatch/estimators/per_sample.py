"""An unbiased estimate from each step's per-sample norms."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.estimators.average import unbiased
from divebatch.estimators.chunk_gradients import sq_norm
from divebatch.estimators.estimator import Scene
from divebatch.estimators.stepwise import Stepwise
from divebatch.measurement import Diversity
from divebatch.norms import DiversityMeter
from divebatch.norms.backward import Backward
from divebatch.norms.compiled_engine import Tapped
from divebatch.norms.meter import MODES

OnPass = Callable[[Tensor, Any, Any], None]


class PerSample(Stepwise):
    """Per-sample norms against the norm of their sum, for each backward pass at its own weights.

    Bias: none; the mean over the epoch is of the weights the epoch passed through. Cost: `trajectory`'s, that is the
    norms within the normal backward passes and one copy of the trainable parameters. It has the least scatter of all
    that look at single steps, since a batch of b counts as b chunks.

    Not for BatchNorm in training mode: samples then have no gradients of their own, their contributions cancel within
    the batch, and ||G||^2 comes out too small, often below zero. That gets an error; use `split` or `moments`.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        preconditioned: Not possible here: an error that names the estimators that can.
        mode: "exact" norms, or "sketch" for unbiased estimates of them at a fraction of the time.
        compiled: Whether the model is compiled with `torch.compile`.
        fallback: "vmap" measures layers that have no norm rule, slowly; None raises an error that names them.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses, where there is one.
    """

    name = "per-sample"
    measures_norms = True
    takes_batch_norm = False

    def __init__(
        self,
        *,
        decay: float = 1.0,
        preconditioned: bool = False,
        mode: Literal["exact", "sketch"] = "exact",
        compiled: bool = False,
        fallback: Literal["vmap"] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        super().__init__(decay=decay)
        if preconditioned:
            raise ArgumentError(
                "per-sample norms come from factors of each layer's gradient, which cannot be divided coordinate by "
                "coordinate: use Split(preconditioned=True) or Moments(preconditioned=True)"
            )
        require_choice("mode", mode, MODES)
        self._settings = {"mode": mode, "compiled": compiled, "fallback": fallback, "grad_scaler": grad_scaler}
        self._meter: _PassMeter | None = None

    def _prepare(self, scene: Scene) -> None:
        settings = {"loss_reduction": scene.loss_reduction, "share": scene.share, **self._settings}
        self._meter = _PassMeter(scene.model, self._take, **settings)

    def _attach(self, scene: Scene) -> None:
        assert self._meter is not None
        self._meter.attach()

    def _detach(self) -> None:
        assert self._meter is not None
        self._meter.detach()

    def _take(self, pair: Tensor, num_samples: Any, counts: Any) -> None:
        self._average.add(pair, num_samples * counts)
        self._average.num_samples = self._average.num_samples + num_samples

    def _when_empty(self) -> Diversity:
        raise UsageError("the epoch has ended, but no backward pass of two or more samples was seen in it")


class _PassMeter(DiversityMeter):
    """Tells of each backward pass by itself: (tr(Sigma), ||G||^2), samples, and 1 if it counts or else 0."""

    def __init__(self, model: nn.Module, on_pass: OnPass, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._on_pass = on_pass
        self._batch_norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}

    def _take(self, done: Backward | Tapped) -> None:
        self._require_own_gradients()
        super()._take(done)
        self._multiply_out()
        sums = list(self._sums.values())
        size = self.norms.num_counted(done)
        sq_norms = done.sq_norms.sum(dtype=torch.float64) * self.norms.gradient_scale(done) ** 2
        pair = torch.stack(unbiased(sq_norms, sq_norm(sums) / size**2, size, size))
        torch._foreach_zero_(sums)
        is_finite = self.norms.last_counts
        counts = size > 1
        self._on_pass(pair, size, counts if is_finite is None else counts & is_finite)

    def _require_own_gradients(self) -> None:
        for name, module in self._batch_norms.items():
            if module.training:
                raise CoverageError(
                    f"'{name}' ({type(module).__name__}) is in training mode: samples have no gradients of their own, "
                    f"and an estimate from their norms would be wrong. Use estimator='split' or 'moments'"
                )
