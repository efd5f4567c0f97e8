"""Measurements and decisions: the only objects that estimators, policies and controller exchange."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple, Self

import numpy

from divebatch.errors import UndefinedDiversityError, UsageError


class StepEvent(NamedTuple):
    """An upcoming optimizer step, and the batches delivered for it."""

    step: int
    """Optimizer steps before this one."""
    batches: int
    """Batches of the loader since the last step."""
    samples: int
    """Samples in these batches, over all ranks; 0 for a further step on the same samples."""
    local_samples: int
    """Samples in these batches on this rank."""
    batch_size: int
    """Samples of a full step at the current batch size."""
    accumulate: int
    """Batches of the loader in a full step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The uncertainty of estimates of tr(Sigma) and ||G||^2, from the scatter between steps."""

    trace_variance: float
    sq_norm_variance: float
    covariance: float
    degrees: float
    """Degrees of freedom: the number of estimates minus one; fewer if some have more weight than others."""
    bounds_below: bool = True
    """Whether the noise scale has a lower bound; False if a bias of unknown size makes the estimate too large."""

    def quantile(self, level: float) -> float:
        """Return the half-width of the interval at this level, in standard errors (Student's t, two-sided).

        >>> few, many = (Spread(trace_variance=1, sq_norm_variance=1, covariance=0, degrees=d) for d in (5, 1000))
        >>> round(few.quantile(0.95), 2), round(many.quantile(0.95), 2)
        (2.57, 1.96)
        """
        # Student's t, not the normal distribution: few steps give few estimates, whose own scatter is uncertain.
        return t_quantile((1 + level) / 2, self.degrees)


@dataclass(frozen=True, slots=True)
class Diversity:
    """Gradient diversity (the paper's Definition 1) as its two raw sums over samples.

    Both sums are over gradients g_i of each sample's own, unaveraged loss. Partial results over different samples can
    be added for `sum_of_sq_norms`, but not for `sq_norm_of_sum`: add the gradient vectors, then square.

    >>> Diversity(sum_of_sq_norms=8.0, sq_norm_of_sum=4.0, num_samples=10).value
    2.0

    Args:
        sum_of_sq_norms: The sum over samples of ||g_i||^2.
        sq_norm_of_sum: ||sum_i g_i||^2. An unbiased estimate can be negative.
        num_samples: The number of samples in both sums.
        skipped_samples: The number of samples in neither sum, because their gradients were not finite or no step was
            made on them. If this exceeds `num_samples`, training has diverged and the ratio is undefined.
        spread: The uncertainty of an estimate at fixed weights. None: the value is exact, or the paper's estimate,
            whose error is bias.
        inner_variance: Var_i<g_i, g> over samples, g the batch gradient; only from estimators that compare chunks.
    """

    sum_of_sq_norms: float
    sq_norm_of_sum: float
    num_samples: int
    spread: Spread | None = field(default=None, repr=False)
    inner_variance: float | None = field(default=None, repr=False)
    skipped_samples: int = field(default=0, repr=False)

    @classmethod
    def from_noise(cls, trace: float, sq_norm: float, num_samples: int, *, spread: Spread | None = None) -> Self:
        """Return the diversity of `num_samples` samples from tr(Sigma) and ||G||^2, both per sample.

        >>> Diversity.from_noise(300.0, 1.0, 1000).noise_scale
        300.0
        """
        return cls(num_samples * (trace + sq_norm), num_samples**2 * sq_norm, num_samples, spread)

    def of(self, num_samples: int) -> Self:
        """Return the diversity of `num_samples` samples with the same mean gradient and covariance.

        n * diversity does not change, so a measurement of part of an epoch can be reported for the whole epoch.

        >>> part = Diversity(sum_of_sq_norms=8.0, sq_norm_of_sum=4.0, num_samples=10)
        >>> part.value, part.of(40).value, part.noise_scale, part.of(40).noise_scale
        (2.0, 0.5, 19.0, 19.0)
        """
        # If most samples were left out, the result stays as it is and shows their number.
        if num_samples == self.num_samples or self.has_diverged:
            return self
        ratio = num_samples / self.num_samples
        return replace(
            self,
            sum_of_sq_norms=self.sum_of_sq_norms * ratio,
            sq_norm_of_sum=self.sq_norm_of_sum * ratio**2,
            num_samples=num_samples,
        )

    @property
    def trace(self) -> float:
        """The trace tr(Sigma): the mean squared distance of a sample's gradient from the mean gradient."""
        return self.sum_of_sq_norms / self.num_samples - self.sq_norm if self.num_samples else math.nan

    @property
    def sq_norm(self) -> float:
        """The squared norm of the mean gradient, ||G||^2."""
        return self.sq_norm_of_sum / self.num_samples**2 if self.num_samples else math.nan

    @property
    def has_diverged(self) -> bool:
        """Whether most samples had to be left out, so that the others cannot be trusted."""
        return self.skipped_samples > self.num_samples

    @property
    def is_defined(self) -> bool:
        """Whether the ratio exists and is finite."""
        if self.skipped_samples > self.num_samples or not 0 < self.sq_norm_of_sum < math.inf:
            return False
        return math.isfinite(self.sum_of_sq_norms / self.sq_norm_of_sum)

    @property
    def value(self) -> float:
        """The ratio sum_i ||g_i||^2 / ||sum_i g_i||^2: 1/n if all gradients agree, 1 if all are orthogonal."""
        if not self.is_defined:
            raise UndefinedDiversityError(f"diversity is undefined: {self.undefined_reason}")
        return self.sum_of_sq_norms / self.sq_norm_of_sum

    @property
    def undefined_reason(self) -> str:
        """The reason why the ratio does not exist, in words; empty if it exists."""
        if self.is_defined:
            return ""
        if self.has_diverged:
            seen = self.num_samples + self.skipped_samples
            return f"{self.skipped_samples} of {seen} samples were in no step with finite gradients"
        if self.spread is not None and math.isnan(self.sq_norm_of_sum):
            return f"the steps on {self.num_samples} samples were too few for an estimate"
        if self.spread is not None and self.sq_norm_of_sum <= 0:
            return "the noise hides the gradient in so few steps"
        if self.sq_norm_of_sum == 0.0 and math.isfinite(self.sum_of_sq_norms):
            return f"the gradients of {self.num_samples} samples sum to zero"
        sums = f"sum_of_sq_norms={self.sum_of_sq_norms}, sq_norm_of_sum={self.sq_norm_of_sum}"
        if math.isfinite(self.sum_of_sq_norms) and math.isfinite(self.sq_norm_of_sum):
            return f"the ratio of the sums is not a finite number ({sums})"
        return f"NaN or infinite gradients ({sums})"

    @property
    def noise_scale(self) -> float:
        """The noise scale tr(Sigma) / ||G||^2 = n * diversity - 1, in samples.

        Exact if all gradients were taken at the same weights. At least 0; infinite if there is noise but no signal; NaN
        if nothing is known.
        """
        if self.is_defined:
            # An estimate's error can make the value negative, but a noise scale never is.
            return max(0.0, self.num_samples * (self.sum_of_sq_norms / self.sq_norm_of_sum) - 1.0)
        if self.has_diverged or math.isnan(self.trace):
            return math.nan
        return math.inf if self.trace > 0 else 0.0

    def noise_scale_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of the noise scale at this level (Fieller's interval of a ratio).

        The upper end is infinite if ||G||^2 cannot be distinguished from zero. The lower end is 0 if the estimate has
        an unknown upward bias. A value without spread is its own interval.

        >>> sure = Spread(trace_variance=0.01, sq_norm_variance=0.0001, covariance=0.0, degrees=1e6)
        >>> low, high = Diversity.from_noise(10.0, 1.0, 100, spread=sure).noise_scale_interval()
        >>> round(low, 2), round(high, 2)
        (9.69, 10.28)
        """
        if self.spread is None:
            return (self.noise_scale, self.noise_scale)
        if self.skipped_samples > self.num_samples:
            return (0.0, math.inf)
        trace, sq_norm = self.trace, self.sq_norm
        # If ||G||^2 comes out too small by chance, so does its scatter: most misses would be above the truth, on the
        # side that lets batches grow. So the lower end gets half the probability of a miss.
        low, _ = _ratio_interval(trace, sq_norm, self.spread, self.spread.quantile((1 + level) / 2))
        _, high = _ratio_interval(trace, sq_norm, self.spread, self.spread.quantile(level))
        high = max(low, high) if high > 0 else 0.0
        return (low if self.spread.bounds_below else 0.0, high)

    def in_record(self, *, at_fixed_weights: bool) -> dict[str, Any]:
        """Return the fields of an epoch's record; an infinite end is None, as JSON has no infinity."""
        low, high = (math.inf, math.inf) if self.spread is None else self.noise_scale_interval()
        value, count = self.value if self.is_defined else None, self.num_samples
        fields: dict[str, Any] = {
            "skipped_samples": self.skipped_samples,
            "diversity": value,
            "diversity_low": (1 + low) / count if low < math.inf else None,
            "diversity_high": (1 + high) / count if high < math.inf else None,
        }
        if at_fixed_weights:
            fields["noise_scale"] = None if value is None else self.noise_scale
            fields["noise_scale_low"] = low if low < math.inf else None
            fields["noise_scale_high"] = high if high < math.inf else None
        return fields


def _ratio_interval(trace: float, sq_norm: float, spread: Spread, reach: float) -> tuple[float, float]:
    """Return the range of positive ratios B for which trace - B * sq_norm is within `reach` standard errors of 0."""
    size = max(abs(trace), abs(sq_norm))
    unit = size / reach if size < math.inf else 0.0
    # Scaled, since squares of very large or small numbers would leave the range of floats.
    trace_error = math.sqrt(spread.trace_variance) / unit if unit else math.inf
    sq_norm_error = math.sqrt(spread.sq_norm_variance) / unit if unit else math.inf
    if not (trace_error < 1e50 and sq_norm_error < 1e50):
        return (0.0, math.inf)
    trace, sq_norm, most = trace / size, sq_norm / size, trace_error * sq_norm_error
    a = sq_norm**2 - sq_norm_error**2
    b = trace * sq_norm - min(most, max(-most, spread.covariance / unit / unit))
    c = trace**2 - trace_error**2
    root = b + math.sqrt(max(0.0, b**2 - a * c))
    if root <= 0:
        return (0.0, math.inf)
    low = max(0.0, c / root) if trace > 0 else 0.0
    return (low, max(low, root / a) if a > 0 and sq_norm > 0 else math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The part of a training's past that a policy may see; policies themselves have no memory."""

    decisions_at_size: int = 0
    """Decisions made at the current batch size, including this one: one an epoch, or every few steps."""
    previous_batch_size: int | None = None
    """The batch size before the last change; None before any change."""
    unclamped: float | None = None
    """The size requested by the last decision's rule, before floor and cap."""
    first_loss: float | None = None
    """Training loss of the first epoch."""
    best_loss: float | None = None
    epochs_since_best: int = 0
    """Epochs finished since the lowest loss; 0 if the last epoch had the lowest."""
    first_sq_norm: float | None = None
    """The first measured ||G||^2."""
    throughputs: tuple[tuple[int, float], ...] = ()
    """(batch size, samples a second) of the fastest epoch at each size; kept only if a policy needs them."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the history that `dataclasses.asdict` saved, even through a format without tuples."""
        return cls(**{**values, "throughputs": tuple(map(tuple, values.get("throughputs", ())))})

    def with_throughput(self, batch_size: int, samples_per_second: float) -> Self:
        """Return the history after a timed epoch at `batch_size`."""
        by_size = dict(self.throughputs)
        # Only the fastest epoch counts: a slower one may include one-time work of compilers and GPU libraries.
        by_size[batch_size] = max(samples_per_second, by_size.get(batch_size, 0.0))
        return replace(self, throughputs=tuple(sorted(by_size.items())))

    def with_steps(self, seen: "Measurement") -> Self:
        """Return the history within an epoch, before a decision."""
        diversity = seen.diversity
        sq_norm = diversity.sq_norm if diversity is not None and diversity.is_defined else None
        return replace(
            self,
            decisions_at_size=self.decisions_at_size + 1,
            first_sq_norm=sq_norm if self.first_sq_norm is None else self.first_sq_norm,
        )

    def with_epoch(self, seen: "Measurement") -> Self:
        """Return the history after an epoch, before its decision."""
        loss = seen.loss
        best, since = self.best_loss, self.epochs_since_best + 1
        if loss is not None and (best is None or loss < best):
            best, since = loss, 0
        return replace(
            self.with_steps(seen),
            first_loss=loss if self.first_loss is None else self.first_loss,
            best_loss=best,
            epochs_since_best=since,
        )

    def with_decision(self, batch_size: int, decision: "Decision") -> Self:
        """Return the history after `decision`, made at `batch_size`."""
        if decision.batch_size == batch_size:
            return replace(self, unclamped=decision.unclamped)
        return replace(self, unclamped=decision.unclamped, decisions_at_size=0, previous_batch_size=batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The inputs of a policy; all counters include the latest step.

    Args:
        epoch: The number of finished epochs, 1 at the first decision; within an epoch, that epoch's number.
        batch_size: The batch size so far: samples of an optimizer step.
        dataset_size: Samples in one epoch, the paper's n. None: the first epoch of a stream of unknown length. A policy
            that cannot do without should read `known_dataset_size`.
        first_batch_size: The batch size at the start of training; 0 for `batch_size`.
        largest_batch_size: The largest possible batch, in samples; 0 for `dataset_size`.
        step: Optimizer steps so far.
        samples: Samples seen so far.
        diversity: The estimator's measurement. None: no measurement was requested.
        lr: The current learning rate of the first parameter group.
        lr_schedule_ratio: The schedule's own rate relative to its highest so far, without any coupling, of the
            parameter group where the rate has fallen least.
        lr_growth: The growth of the current rate over the schedule's own, relative to the first batch.
        lr_coupling: How the learning rate follows the batch size in this training: a name, or a power of the size.
        loss: The epoch's mean training loss, if the loop passed it: `Controller.step(loss=...)`.
        history: A summary of the epochs before.
    """

    epoch: int
    batch_size: int
    dataset_size: int | None
    first_batch_size: int = 0
    largest_batch_size: int = 0
    step: int = 0
    samples: int = 0
    diversity: Diversity | None = None
    lr: float | None = None
    lr_schedule_ratio: float | None = None
    lr_growth: float = 1.0
    lr_coupling: str | float = "none"
    loss: float | None = None
    history: History = History()

    def __post_init__(self) -> None:
        if not self.first_batch_size:
            object.__setattr__(self, "first_batch_size", self.batch_size)
        if not self.largest_batch_size:
            object.__setattr__(self, "largest_batch_size", self.dataset_size or sys.maxsize)

    @property
    def known_dataset_size(self) -> int:
        """The number of samples in one epoch; raises with a remedy if the number is not known."""
        if self.dataset_size is None:
            raise UsageError(
                "this policy needs the number of samples of an epoch, which a stream of unknown length has only after "
                "its first one: pass AdaptiveLoader(..., epoch_samples=N), or give the dataset a __len__"
            )
        return self.dataset_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's choice of batch size and learning-rate factor.

    Args:
        batch_size: The batch size to use from now on, in samples.
        lr_factor: The factor of the learning rate from now on, in addition to the coupling.
        lr_owed: The factor that the next decision will apply if the size stays; for the record.
        reason: The reason in words, for the record.
        unclamped: The size that the rule requested before floor and cap. None: the rule requested no size.
    """

    batch_size: int
    lr_factor: float = 1.0
    lr_owed: float = field(default=1.0, repr=False)
    reason: str = ""
    unclamped: float | None = field(default=None, repr=False)

    def at_most(self, dataset_size: int) -> Self:
        """Return the decision with its batch size limited to the dataset."""
        if self.batch_size <= dataset_size:
            return self
        reason = f"{self.reason}; limited to the {dataset_size} samples there are".lstrip("; ")
        return replace(self, batch_size=dataset_size, reason=reason)

    def at_least(self, size: int) -> Self:
        """Return the decision with at least the batch size that ranks and estimator need."""
        if self.batch_size >= size:
            return self
        reason = f"{self.reason}; raised to the {size} samples that ranks and estimator need".lstrip("; ")
        return replace(self, batch_size=size, reason=reason)


def gain(ratio: float, noise: float | None) -> float:
    """Return AdaScale's gain: the worth of one step at `ratio` base batches, in steps at the base batch.

    Johnson et al. 2020: without noise a larger batch gains nothing; with only noise the gain is `ratio`.

    Args:
        ratio: The batch size over the base batch size.
        noise: The variance of the base batch's gradient over the squared norm of the mean gradient: the noise scale
            over the base batch size. None: not known, for a gain of 1.

    >>> gain(8.0, 0.0), gain(8.0, math.inf), gain(8.0, 8.0), gain(8.0, None)
    (1.0, 8.0, 4.5, 1.0)
    """
    if noise is None:
        return 1.0
    return ratio if noise == math.inf else (noise + 1) / (noise / ratio + 1)


# Student's t distribution

MOST_DEGREES = 1e6
"""Degrees of freedom from which t is treated as normal."""
NODES, WEIGHTS = numpy.polynomial.legendre.leggauss(64)


@lru_cache(maxsize=128)  # intervals of one size repeat the same call
def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t at `probability` (from 0.5 to 1, exclusive); infinite below 1 degree.

    >>> round(t_quantile(0.975, 4), 4), round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 1e6), 3)
    (2.7764, 12.706, 1.96)
    """
    if degrees < 1:
        return math.inf
    degrees = min(degrees, MOST_DEGREES)
    value = NormalDist().inv_cdf(probability)
    # Newton's method: above 0 the distribution is concave and t above the normal, so each step goes up to the root.
    while True:
        below, density = _distribution(value, degrees)
        step = (probability - below) / density
        value += step
        if step <= 1e-12 * value:
            return value


def _distribution(value: float, degrees: float) -> tuple[float, float]:
    """Return P(t <= value), value >= 0, and the density. The density of a in t = sqrt(n) tan(a) is c cos(a)^(n - 1)."""
    end = math.atan(value / math.sqrt(degrees))
    # The nodes cluster logarithmically towards pi/2, where the density of few degrees has a root.
    log_rest, parts = math.log1p(-2 * end / math.pi), (NODES + 1) / 2
    a, slope = -math.pi / 2 * numpy.expm1(parts * log_rest), -math.pi / 2 * log_rest * numpy.exp(parts * log_rest)
    x = degrees / 2
    if degrees < 100:
        log_ratio = math.lgamma(x + 0.5) - math.lgamma(x)
    else:  # the difference of two large numbers has few digits: Stirling's series
        log_ratio = math.log(x) / 2 - 1 / (8 * x) + 1 / (192 * x**3) - 1 / (640 * x**5)
    c = math.exp(log_ratio) / math.sqrt(math.pi)
    integral = float(WEIGHTS / 2 @ (slope * numpy.cos(a) ** (degrees - 1)))
    return 0.5 + c * integral, c * math.cos(end) ** (degrees + 1) / math.sqrt(degrees)
