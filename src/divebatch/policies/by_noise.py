"""Policies that follow the gradient noise, tr(Sigma), and the signal, ||G||^2."""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Decision, Diversity, Measurement
from divebatch.policies.auto import power_of
from divebatch.policies.policy import (
    Capped,
    Periodic,
    ratio,
    require_diversity,
    require_loss,
    times_first,
    wanted_size,
)
from divebatch.policies.wrappers import ramped


@dataclass(frozen=True)
class FromNoise(Periodic):
    """A rule based on the noise scale alone. If the estimate has an interval, all of it must ask for a change."""

    @abstractmethod
    def wanted(self, noise_scale: float) -> float:
        """Return the batch size for this noise scale; larger noise scales must not give smaller sizes."""

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        size, remark = wanted_size(require_diversity(self, seen), seen.batch_size, self.wanted)
        name = type(self).__name__
        return size, remark if size is None else f"{name} wants {size:.1f}" + (f", {remark}" if remark else "")


@dataclass(frozen=True)
class NoiseScale(FromNoise):
    """The noise scale B as the batch size (McCandlish et al. 2018): half of such a batch's gradient is noise.

    At b = B, training takes twice the fewest possible steps and twice the fewest possible samples. With a step cost r
    the batch is sqrt(r * B), which grows more slowly.

    >>> NoiseScale(4096).wanted(900.0), NoiseScale(4096, step_cost=4).wanted(900.0)
    (900.0, 60.0)

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions.
        monotone: Whether the batch never shrinks.
        step_cost: The number of samples that one optimizer step is worth. None: the batch is B.
    """

    step_cost: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_cost is not None:
            require_positive("step_cost", self.step_cost)

    def wanted(self, noise_scale: float) -> float:
        return noise_scale if self.step_cost is None else math.sqrt(self.step_cost * max(noise_scale, 0.0))


@dataclass(frozen=True)
class NoiseDoubling(Capped):
    """Doublings of the first batch b0 towards sqrt(b0 * B), where B is the noise scale.

    The first batch is taken as the price of a step, in samples: at this price, sqrt(b0 * B) wastes least (McCandlish
    et al. 2018). Early in training B is about as large as a good fixed batch, so the size grows soon. Later B grows by
    orders of magnitude, and the size only with the root of B.

    The size changes by doublings, so that a compiler sees few shapes, and never falls. A change needs the whole 95 %
    interval of the estimate above the current size. At the cap nothing is measured any more.

    The default estimator is "moments". Without momentum, "moments" gives only an upper bound, and "per-sample" replaces
    it if the model has no BatchNorm and a norm rule for each layer; otherwise a warning says so, and nothing grows. Use
    "split" if batches are processed in two or more parts, and for decisions within epochs: in the first steps of a
    training, "moments" is several times too large. Do not use "trajectory", whose B is far too large.

    After each growth the learning rate reaches its new value one decision later.

    >>> NoiseDoubling(4096)
    NoiseDoubling(max_batch_size=4096, step_cost=None)

    Args:
        max_batch_size: The largest batch, in samples.
        step_cost: The number of samples that one optimizer step is worth. None: the first batch. If a step's
            fixed cost equals that of many more samples, measure this number with `advise`.
    """

    needs = frozenset({"diversity"})
    estimator = "moments"
    needs_lr_coupling = True
    moves_lr = True
    decides_within_epochs = True

    _: KW_ONLY
    step_cost: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_cost is not None:
            require_positive("step_cost", self.step_cost)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Return True until the cap is reached, after which nothing is left to decide."""
        return batch_size < self.max_batch_size

    def next(self, seen: Measurement) -> Decision:
        """Return the doubling nearest to the wanted size; the learning rate follows one decision later."""
        # Limited first: the learning rate must be made for the size that will be used.
        doubled = self._doubled(seen).at_most(seen.largest_batch_size)
        return ramped(doubled, seen, decisions=1, power=power_of(seen.lr_coupling))

    def _doubled(self, seen: Measurement) -> Decision:
        if seen.diversity is None and not self.measures(seen.epoch, seen.batch_size):
            return Decision(batch_size=seen.batch_size)
        cost = self.step_cost or seen.first_batch_size

        def mean(noise_scale: float) -> float:
            return math.sqrt(cost * max(noise_scale, 0.0))

        wanted, reason = wanted_size(require_diversity(self, seen), seen.batch_size, mean)
        if wanted is None or math.isnan(wanted):
            return Decision(batch_size=seen.batch_size, reason=reason)
        size = max(seen.batch_size, self._nearest(seen.first_batch_size, wanted))
        of = "first batch" if self.step_cost is None else f"{self.step_cost:g}"
        reason = f"sqrt({of} * noise scale) = {wanted:.0f}" + (f", {reason}" if reason else "")
        return Decision(batch_size=size, reason=reason, unclamped=wanted)

    def _nearest(self, first: int, wanted: float) -> int:
        if wanted >= self.max_batch_size:
            return self.max_batch_size
        # By doublings, so that a compiler sees few shapes.
        doublings = round(math.log2(wanted / first)) if wanted > first else 0
        return min(first << doublings, self.max_batch_size)


@dataclass(frozen=True)
class NormTest(FromNoise):
    """The norm test (Byrd et al. 2012; Lau et al. 2024): ceil(B / eta^2).

    This is the smallest batch whose gradient has a standard deviation of at most `eta` times its norm. The original
    compares the variance with the noisy batch gradient's norm. Here an estimator gives both, so noise does not fool the
    test. The learning rate does not change.

    >>> NormTest(4096, eta=0.5).wanted(100.3)
    402.0

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions.
        monotone: Whether the batch never shrinks.
        eta: The largest standard deviation of the batch gradient, relative to the gradient's norm.
    """

    eta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("eta", self.eta)

    def wanted(self, noise_scale: float) -> float:
        needed = noise_scale / self.eta**2
        return float(math.ceil(needed)) if math.isfinite(needed) else needed


@dataclass(frozen=True)
class InnerProductTest(Periodic):
    """The inner product test (Bollapragada et al. 2018): a batch whose gradient is often enough a descent direction.

    This test is less strict than the norm test. If a is the fraction of the noise along the gradient, its two parts ask
    for a * B / theta^2 and (1 - a) * B / nu^2 samples; the larger number counts.

    The fraction comes from the chunks of a batch, the last against the others, by the estimators "split" and "moments".
    As in the original, g is noisy, which makes the fraction too large: 1 + B / b times for noise that is alike in all
    directions.

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions.
        monotone: Whether the batch never shrinks.
        theta: The largest standard deviation of <g_i, g> over the batch, relative to ||g||^2.
        nu: The largest noise at right angles to g, relative to ||g||. None: no second part.
    """

    needs = frozenset({"diversity", "inner_variance"})

    theta: float = 0.5
    nu: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("theta", self.theta)
        if self.nu is not None:
            require_positive("nu", self.nu)

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        diversity = require_diversity(self, seen)
        if math.isnan(diversity.trace):  # a step or two without a result are no reason to stop
            return None, "nothing was seen that would justify a change"
        along = fraction_along(diversity)
        across = (1 - along) / self.nu**2 if self.nu is not None else 0.0
        factor = max(along / self.theta**2, across)
        size, remark = wanted_size(diversity, seen.batch_size, lambda noise: factor * noise if factor else 0.0)
        remark = f"{along:.1%} of the noise is along the gradient" + (f"; {remark}" if remark else "")
        return (math.ceil(size) if size is not None and math.isfinite(size) else size), remark


def fraction_along(diversity: Diversity) -> float:
    """Return Var_i<g_i, g> / (tr(Sigma) ||G||^2), from 0 to 1; the strictest, 1, if the ratio cannot be formed."""
    if diversity.inner_variance is None:
        raise UsageError(
            "the inner product test needs the noise along the gradient, which this estimate lacks: use "
            "estimator='split' or 'moments'"
        )
    below = diversity.trace * diversity.sq_norm
    fraction = diversity.inner_variance / below if below > 0 else math.nan
    return min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 1.0


@dataclass(frozen=True)
class SimiGrad(Periodic):
    """SimiGrad (Qin et al. 2021): changes of 10 % that keep the cosine of two half-batch gradients at a target.

    For a batch of b the cosine is computed from the noise scale B, as 1 / (1 + 2 B / b), rather than from single noisy
    pairs. If its interval contains the target, nothing changes. The original changes the size at every step; here every
    `every_epochs` epochs or `every_steps` steps. The learning rate follows by the square root. The size settles at
    2 * B * target / (1 - target).

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions.
        monotone: Whether the batch never shrinks.
        target_cosine: The cosine to keep, between 0 and 1.
        multiple_of: The unit of all sizes, in samples, and the smallest change.
    """

    lr_coupling = "sqrt"
    has_many_sizes = False  # a wrapper that rounds down would undo changes of a tenth

    monotone: bool = False
    target_cosine: float = 0.3
    multiple_of: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("multiple_of", self.multiple_of)
        require_positive("target_cosine", self.target_cosine)
        if self.target_cosine >= 1:
            raise ArgumentError(f"target_cosine must be below 1, got target_cosine={self.target_cosine!r}")

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        low, high = cosines(require_diversity(self, seen), seen.batch_size)
        b, least = seen.batch_size, self.multiple_of  # a smaller step would be rounded away
        reason = f"likeness of halves {low:.3f} to {high:.3f}, target {self.target_cosine:g}"
        if high < self.target_cosine:
            return max(b + least, int(1.1 * b)), reason
        if low > self.target_cosine and b > least:
            return max(least, min(b - least, int(0.9 * b))), reason
        return None, reason


def cosines(diversity: Diversity, batch_size: int) -> tuple[float, float]:
    """Return the interval of the cosine of two half-batch gradients; 0 if there is no noise scale."""
    if diversity.spread is None and not diversity.is_defined:
        return (0.0, 0.0)
    low, high = diversity.noise_scale_interval()
    return (1 / (1 + 2 * max(high, 0.0) / batch_size), 1 / (1 + 2 * max(low, 0.0) / batch_size))


@dataclass(frozen=True)
class CABS(Periodic):
    """The batch size lr * tr(Sigma) / loss (CABS, Balles et al. 2017), for losses that fall to about zero.

    The learning rate does not change. The original decides at every step from exponential means that start at fixed
    values. Here the estimator takes debiased means, over the epoch or with its `decay`. The size stays if the interval
    of tr(Sigma) contains it. The original's floor and cap are 16 and 2048.

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions.
        monotone: Whether the batch never shrinks.
    """

    needs = frozenset({"diversity", "loss"})
    decides_within_epochs = False

    monotone: bool = False
    min_batch_size: int = 16

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        diversity, loss = require_diversity(self, seen), require_loss(self, seen)
        low, value, high = (ratio((seen.lr or 0.0) * trace, loss) for trace in traces(diversity))
        reason = f"lr * tr(Sigma) / loss = {value:.1f}"
        # The interval is checked first: if it contains the current size, no change is justified.
        if low < high and low <= seen.batch_size <= high:
            return None, f"{reason}, between {low:.0f} and {high:.0f} with 95 % confidence: no change"
        return (round(value) if math.isfinite(value) else value), reason


def traces(diversity: Diversity) -> tuple[float, float, float]:
    """Return tr(Sigma) between the ends of its interval; a single estimate shows no scatter, so it has no upper end."""
    trace, spread = diversity.trace, diversity.spread
    if math.isnan(trace):
        return (math.nan, math.nan, math.nan)
    errors = 0.0 if spread is None else spread.quantile(0.95)
    reach = errors * math.sqrt(spread.trace_variance) if spread is not None and errors < math.inf else errors
    lowest = trace - reach if spread is None or spread.bounds_below else 0.0
    return (max(0.0, lowest), max(0.0, trace), trace + reach)


@dataclass(frozen=True)
class GradientDamp(Capped):
    """AdaDamp's rule for networks (Sievert): ceil(b0 * ||G_0||^2 / ||G||^2).

    G_0 is the first measured gradient. If the estimate of ||G||^2 is not above zero, the size stays.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    needs = frozenset({"diversity"})
    estimator = "moments"
    decides_within_epochs = True
    has_many_sizes = True

    def next(self, seen: Measurement) -> Decision:
        now = require_diversity(self, seen).sq_norm
        first = now if seen.history.first_sq_norm is None else seen.history.first_sq_norm
        factor = ratio(first, now) if now > 0 else math.nan
        return times_first(seen, factor, self.max_batch_size, f"the squared gradient norm fell by {factor:g}")
