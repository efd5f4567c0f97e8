"""Weighted means of small unbiased estimates, with their spread, and the base class of estimators that use them.

On a GPU each operation on a single number is a kernel launch. So the norms of many steps are read at once, and all
further computation happens on the host.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from divebatch.checks import require_count
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.estimator import Estimator, TrainingContext
from divebatch.measurement import Diversity, Spread
from divebatch.ranks import Ranks

MOST_WAITING = 512
"""The most estimates whose norms stay unread on the device."""

Norms = Tensor | float
"""Norms of several tensors on their device, or after reading the sum of their squares. Also a single number, such as a
product of two gradients, which reading does not change."""


def norms_of(tensors: Sequence[Tensor]) -> Norms:
    """Compute the norm of each tensor with two operators on the device."""
    return torch.stack(torch._foreach_norm(list(tensors))) if tensors else 0.0


def read(many: Sequence[Norms]) -> list[float]:
    """Read sums of squares, and single numbers, in float64. Waits for the device, once for all tensors of one kind."""
    found = [0.0 if isinstance(each, Tensor) else each for each in many]
    alike: dict[object, list[tuple[int, Tensor]]] = {}
    for place, each in enumerate(many):
        if isinstance(each, Tensor):
            alike.setdefault((each.device, each.dtype), []).append((place, each))
    # One copy from the device for all tensors of a kind: each copy waits for everything before it.
    for group in alike.values():
        numbers = iter(torch.cat([each.reshape(-1) for _, each in group]).cpu().double().tolist())
        for place, each in group:
            own = itertools.islice(numbers, each.numel())
            found[place] = sum(norm * norm for norm in own) if each.ndim else next(own)
    return found


def unbiased(weighted_sq_norms: Any, sq_norm_of_mean: Any, num_chunks: Any, num_samples: Any) -> tuple[Any, Any]:
    """Compute tr(Sigma) and ||G||^2 from the mean gradients of two or more chunks of samples at the same weights.

    `weighted_sq_norms` is the sum over chunks of s_j ||g_j||^2, for s_j samples with the mean gradient g_j.
    `sq_norm_of_mean` is ||sum_j s_j g_j / b||^2 over all b = `num_samples`. Chunks may differ in size. Single samples
    are chunks of one, so per-sample norms give the same formula. The arguments are numbers or tensors of numbers.
    """
    trace = (weighted_sq_norms - num_samples * sq_norm_of_mean) / (num_chunks - 1)
    return trace, sq_norm_of_mean - trace / num_samples


def inner_variance(sq_norms: tuple[float, float], sizes: tuple[int, int], sq_norm_of_mean: float) -> float:
    """Estimate Var_i<g_i, g> over samples, from the squared norms of two chunks' mean gradients and of their mean g.

    <g_1 - g_2, g> has mean zero and the variance of one sample times 1/s_1 + 1/s_2. The norms alone determine it.
    """
    (first, second), (size, other) = sq_norms, sizes
    between = ((size + other) ** 2 * sq_norm_of_mean - size**2 * first - other**2 * second) / (2 * size * other)
    inner = (size * first - other * second + (other - size) * between) / (size + other)
    return inner * inner * size * other / (size + other)


class StepEstimate(NamedTuple):
    """Numbers on the device from which tr(Sigma) and ||G||^2 follow, for one step or a few."""

    parts: Sequence[Norms]
    """The values to read."""
    numbers: Callable[[Sequence[float]], tuple[float, ...]]
    """A function of the read values that returns the weight, tr(Sigma), ||G||^2, and further numbers to average."""


class PairAverage:
    """The weighted means of tr(Sigma) and of ||G||^2, averaged separately: the mean of their ratios would be biased.

    Each pair may have a third number, the variance of <g_i, g>, and a fourth, the part of tr(Sigma) that falls as
    ||G||^2 rises. An estimate with numbers that are not finite is left out; its samples count as `skipped_samples`, not
    as `num_samples`.

    Args:
        decay: Below 1 for an exponential mean: each new pair multiplies the weights of earlier ones by this factor.
        overlap: The number of previous estimates that share gradients with each estimate. The spread includes their
            products, with weights that fall with distance, so that it stays positive (Newey and West 1987).
        trusts_negative: False for estimates whose bias may make ||G||^2 negative: the interval is then unbounded.
    """

    def __init__(self, *, decay: float = 1.0, overlap: int = 0, trusts_negative: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got decay={decay!r}")
        self.decay, self.overlap, self._trusts_negative = float(decay), overlap, trusts_negative
        self.bounds_below = True
        """False if an unknown bias makes noise scales too large: the interval then begins at zero."""
        self.relative_variance = 0.0
        """The relative variance of an error of ||G||^2 that all estimates share, which their scatter does not show."""
        self.shards = Ranks.alone()
        """The ranks whose partial estimates add up; all of them read at the same time."""
        self.forget()

    def forget(self) -> None:
        """Drop all estimates."""
        self.num_samples: int | Tensor = 0
        """Samples that were observed, in an estimate or between two estimates."""
        self.skipped_samples = 0
        """Samples in no estimate, because gradients were not finite or no step was made on them."""
        self._waiting: list[StepEstimate] = []
        """Estimates that were not read yet."""
        self._first: Any = np.zeros(())
        """Sum of w * (1, trace, sq_norm, ...)."""
        self._second: Any = np.zeros(())
        """Sum of w^2 times the outer product of (1, trace, sq_norm, ...) with itself."""
        self._between: Any = np.zeros(())
        """The products of each row with the `overlap` rows before it, with weights that fall with distance."""
        self._recent: list[Any] = []
        """The latest rows times their weights, newest first."""

    def add_step(self, estimate: StepEstimate) -> None:
        """Add an estimate whose norms stay on the device until the mean is read, or until many estimates wait."""
        self._waiting.append(estimate)
        # This bounds the memory of waiting estimates. The time of reading changes no result: sums are in step order.
        if len(self._waiting) >= MOST_WAITING:
            self._read_waiting()

    def _read_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            # One read from the device for all, and one sum over ranks that hold shards.
            values = iter(self.shards.sum_numbers(read([part for each in waiting for part in each.parts])))
            rows = [each.numbers(list(itertools.islice(values, len(each.parts)))) for each in waiting]
            self.extend([pair for _, *pair in rows], [weight for weight, *_ in rows])

    def extend(self, pairs: Iterable[Sequence[float]], weights: Iterable[float]) -> None:
        """Add estimates in turn. An estimate with a weight of zero is ignored, whatever the pair holds."""
        with np.errstate(all="ignore"):  # infinities and NaN propagate, as in torch
            for pair, weight in zip(pairs, weights, strict=True):
                is_finite = all(map(math.isfinite, pair))
                if not is_finite:
                    self.num_samples = self.num_samples - int(weight)
                    self.skipped_samples += int(weight)
                row = np.array((1.0, *pair)) * weight if weight > 0 and is_finite else np.zeros(1 + len(pair))
                self._first = self._first * self.decay + row
                self._second = self._second * self.decay**2 + np.outer(row, row)
                self._relate(row)

    def _relate(self, row: Any) -> None:
        """Add the products of `row` with the earlier rows, which have faded since."""
        self._recent = [each * self.decay for each in self._recent]
        if self._recent:
            # Newey and West's weights: neighbours share gradients, and with these weights the variance stays positive.
            near = sum((1 - distance / (self.overlap + 1)) * each for distance, each in enumerate(self._recent, 1))
            self._between = self._between * self.decay**2 + np.outer(row, near)
        self._recent = [row, *self._recent][: self.overlap]

    @property
    def is_empty(self) -> bool:
        """Whether there is no estimate to average; waits for the device."""
        self._read_waiting()
        return not self._first.flat[0] > 0

    def diversity(self) -> Diversity:
        """Return the means and their spread; waits for the device."""
        self._read_waiting()
        total, *sums = self._first.tolist()
        trace, sq_norm, *inner = means = [each / total for each in sums]
        spread = self._with_shared_error(self._spread(total, trace, sq_norm), means)
        if sq_norm < 0 and not self._trusts_negative:
            # A biased negative estimate shows nothing about the noise scale: the interval is unbounded.
            spread = replace(spread, sq_norm_variance=math.inf)
        found = Diversity.from_noise(trace, sq_norm, int(self.num_samples), spread=spread)
        inner_variance = inner[0] if inner and math.isfinite(inner[0]) else None
        return replace(found, inner_variance=inner_variance, skipped_samples=self.skipped_samples)

    def over(self, ranks: Ranks) -> "PairAverage":
        """Return the mean over all ranks, each of which saw its own samples. All ranks must call this."""
        if ranks.is_alone:
            return self
        states = ranks.gather(self.state_dict())
        total = PairAverage(decay=self.decay)
        # A rank without any estimate has a plain zero, which matches every shape.
        total._first, total._second = (sum(np.array(state[key]) for state in states) for key in ("first", "second"))
        total.num_samples = sum(state["num_samples"] for state in states)
        total.skipped_samples = sum(state["skipped_samples"] for state in states)
        return total

    def unknown(self) -> Diversity:
        """Return the result without any estimate: every noise scale is possible."""
        nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
        num_samples = max(1, int(self.num_samples))
        return Diversity(math.nan, math.nan, num_samples, nothing, skipped_samples=self.skipped_samples)

    def _spread(self, total: float, trace: float, sq_norm: float) -> Spread:
        """Estimate the spread from the estimates' distances to the mean, even if some are less exact than others."""
        second = self._second
        products = (second + self._between + self._between.T)[:3, :3]
        to_mean = np.array([[-trace, 1.0, 0.0], [-sq_norm, 0.0, 1.0]])
        scatter = to_mean @ products @ to_mean.T
        ratio = float(second[0, 0]) / total**2  # one over the number of estimates, if all weights are equal
        fitted = float(products[0, 0]) / total**2  # the part that the mean absorbs if estimates are independent
        # A single estimate shows no scatter: use a tiny divisor instead of zero.
        covariance = (scatter / total**2 / max(1 - fitted, 1e-9)).tolist()
        return Spread(
            trace_variance=max(0.0, covariance[0][0]),
            sq_norm_variance=max(0.0, covariance[1][1]),
            covariance=covariance[0][1],
            # Fewer degrees if some estimates have more weight than others; Student's t then widens the interval.
            degrees=1 / ratio - 1,
            bounds_below=self.bounds_below,
        )

    def _with_shared_error(self, spread: Spread, means: Sequence[float]) -> Spread:
        """Add an error of ||G||^2 that does not change from step to step.

        If ||G||^2 is too large by a fraction, tr(Sigma) is too small by that fraction of the fourth number.
        """
        if not self.relative_variance:
            return spread
        _, sq_norm, _, taken_off = means
        return replace(
            spread,
            trace_variance=spread.trace_variance + self.relative_variance * taken_off**2,
            sq_norm_variance=spread.sq_norm_variance + self.relative_variance * sq_norm**2,
            covariance=spread.covariance - self.relative_variance * taken_off * sq_norm,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as plain numbers."""
        self._read_waiting()
        return {
            "first": self._first.tolist(),
            "second": self._second.tolist(),
            "num_samples": int(self.num_samples),
            "skipped_samples": self.skipped_samples,
            "between": self._between.tolist(),
            "recent": [each.tolist() for each in self._recent],
            "bounds_below": self.bounds_below,
        }

    def load_state_dict(self, state: dict[str, Any], *, is_first: bool = True) -> None:
        """Continue with saved sums, which only the first rank takes over."""
        self.forget()
        if not is_first:
            return
        self._first, self._second = np.array(state["first"]), np.array(state["second"])
        self.num_samples, self.skipped_samples = state["num_samples"], state["skipped_samples"]
        self._between = np.array(state["between"])
        self._recent = [np.array(each) for each in state["recent"]][: self.overlap]
        self.bounds_below = state["bounds_below"]


class AveragedEstimator(Estimator):
    """An estimator that averages pairs (tr(Sigma), ||G||^2) of steps, each at its own weights, over an epoch.

    The interval comes from the scatter between steps, which includes the change of the weights over the epoch. If ranks
    share the batches and each estimates from its own samples, the mean is over all ranks. If decisions are made within
    epochs, each uses the steps since the last decision; an exponential mean continues across decisions.

    Subclasses fill `_average` between `_attach` and `_detach`.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        every_steps: The number of steps from one estimate to the next.
    """

    nothing_seen: ClassVar[str]
    """The error message if a whole epoch gave no estimate."""
    may_see_nothing: ClassVar[bool] = False
    """Whether an epoch with too few steps for an estimate is allowed."""
    sees_all_ranks: ClassVar[bool] = False
    """Whether each rank sees all ranks' data, so that estimates are not averaged over ranks."""
    trusts_negative: ClassVar[bool] = True
    """Whether ||G||^2 is unbiased, so that intervals are valid even for negative estimates."""

    def __init__(self, *, decay: float = 1.0, every_steps: int = 1) -> None:
        require_count("every_steps", every_steps)
        self._decay, self._every_steps = PairAverage(decay=decay).decay, every_steps
        # Each decision must see two estimates; an exponential mean continues across decisions.
        self.min_steps_between_decisions = 2 * every_steps if every_steps > 1 and decay == 1 else 1
        self._average: PairAverage | None = None
        """The estimates so far, while an epoch is measured."""
        self._was_read = False

    def start(self) -> None:
        context, self._was_read = self.context, False
        self._average = PairAverage(decay=self._decay, trusts_negative=self.trusts_negative)
        self._attach(context, self._average)

    @abstractmethod
    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        """Start observing, and fill `average` from then on."""

    @abstractmethod
    def _detach(self) -> None:
        """Remove all hooks and free all memory."""

    def window(self) -> Diversity:
        self._was_read = True
        seen = self._seen()
        if self._decay == 1:
            self._at_work().forget()
        return seen

    def finish(self) -> Diversity:
        seen = self._seen()
        self.close()
        return seen

    def close(self) -> None:
        if self._average is not None:
            self._detach()
        self._average = None

    def state_dict(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        # The samples of all ranks, so that the number of ranks may change on resuming.
        return {"estimates": self._average.over(self._ranks()).state_dict(), "was_read": self._was_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at_work().load_state_dict(state["estimates"], is_first=self._ranks().is_first)
        self._was_read = state["was_read"]

    def _seen(self) -> Diversity:
        average = self._at_work().over(self._ranks())
        if not average.is_empty:
            return average.diversity()
        # A few steps may give no estimate, such as a last batch of one sample; a whole epoch should give one.
        too_few = self.may_see_nothing and average.num_samples
        if self._was_read or too_few or average.skipped_samples:
            return average.unknown()
        raise UsageError(self.nothing_seen)

    def _ranks(self) -> Ranks:
        """Return the ranks whose estimates must be averaged because each sees its own samples."""
        # Gradients that DDP has averaged are equal on all ranks: adding them up would count them several times.
        return Ranks.alone() if self.sees_all_ranks else self.context.loader.ranks

    def _at_work(self) -> PairAverage:
        if self._average is None:
            raise UsageError("this estimator measures nothing now: bind() comes first, and then start()")
        return self._average
