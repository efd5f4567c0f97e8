"""Means of many small unbiased estimates, with their spread, and the base of estimators that average them.

On a GPU each operation on a single number is a launch like any other. So nothing is computed with the norms of a step
before they are read, many steps at once, and then on the host.
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
"""Estimates whose norms may lie on the device unread."""

Norms = Tensor | float
"""Norms of several tensors, one each, where they were computed; or, once read, the sum of their squares. Also a number
by itself, such as a product of two gradients, which is the same before and after."""


def norms_of(tensors: Sequence[Tensor]) -> Norms:
    """Compute the norm of each tensor, by two operators on the device."""
    return torch.stack(torch._foreach_norm(list(tensors))) if tensors else 0.0


def read(many: Sequence[Norms]) -> list[float]:
    """Read sums of squares, and numbers by themselves, in float64. Waits for the device, once for all of one kind."""
    found = [0.0 if isinstance(each, Tensor) else each for each in many]
    alike: dict[object, list[tuple[int, Tensor]]] = {}
    for place, each in enumerate(many):
        if isinstance(each, Tensor):
            alike.setdefault((each.device, each.dtype), []).append((place, each))
    # One copy from the device for all rows of a kind: each copy waits for everything before it.
    for group in alike.values():
        numbers = iter(torch.cat([each.reshape(-1) for _, each in group]).cpu().double().tolist())
        for place, each in group:
            own = itertools.islice(numbers, each.numel())
            found[place] = sum(norm * norm for norm in own) if each.ndim else next(own)
    return found


def unbiased(weighted_sq_norms: Any, sq_norm_of_mean: Any, num_chunks: Any, num_samples: Any) -> tuple[Any, Any]:
    """Compute tr(Sigma) and ||G||^2 from the mean gradients of two or more chunks of samples at the same weights.

    `weighted_sq_norms` is the sum over chunks of s_j ||g_j||^2, s_j samples with the mean gradient g_j, and
    `sq_norm_of_mean` is ||sum_j s_j g_j / b||^2 over all b = `num_samples`. Chunks may differ in size. Single samples
    are chunks of one, so per-sample norms give the same formula. Numbers, or tensors of them.
    """
    trace = (weighted_sq_norms - num_samples * sq_norm_of_mean) / (num_chunks - 1)
    return trace, sq_norm_of_mean - trace / num_samples


def inner_variance(sq_norms: tuple[float, float], sizes: tuple[int, int], sq_norm_of_mean: float) -> float:
    """Estimate Var_i<g_i, g> over samples, from the squared norms of two chunks' mean gradients and of their mean g.

    <g_1 - g_2, g> has the variance of one sample times 1/s_1 + 1/s_2, and mean zero. It follows from norms alone.
    """
    (first, second), (size, other) = sq_norms, sizes
    between = ((size + other) ** 2 * sq_norm_of_mean - size**2 * first - other**2 * second) / (2 * size * other)
    inner = (size * first - other * second + (other - size) * between) / (size + other)
    return inner * inner * size * other / (size + other)


class StepEstimate(NamedTuple):
    """Numbers on the device that show tr(Sigma) and ||G||^2, of one step or a few."""

    parts: Sequence[Norms]
    """All that is to be read."""
    numbers: Callable[[Sequence[float]], tuple[float, ...]]
    """Turns the values that `parts` were read as into weight, tr(Sigma), ||G||^2, and what else is averaged."""


class PairAverage:
    """The weighted mean of pairs (tr(Sigma), ||G||^2), averaged apart: the mean of their ratios would be biased.

    A third number may come with each pair, the variance of <g_i, g>, and a fourth, the part of tr(Sigma) that falls as
    ||G||^2 rises. An estimate that is not made of finite numbers counts for nothing; its samples go from `num_samples`
    to `skipped_samples`.

    Args:
        decay: Below 1 for an exponential mean: earlier pairs fade by it at each new one.
        overlap: The number of previous estimates that share gradients with each one. The spread counts their products
            too, the less the farther apart they are, so that it stays positive (Newey and West 1987).
        trusts_negative: False for estimates whose bias may carry ||G||^2 below zero: the interval then has no ends.
    """

    def __init__(self, *, decay: float = 1.0, overlap: int = 0, trusts_negative: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got decay={decay!r}")
        self.decay, self.overlap, self._trusts_negative = float(decay), overlap, trusts_negative
        self.bounds_below = True
        """False if an unknown bias makes noise scales too large: the interval then goes down to zero."""
        self.relative_variance = 0.0
        """That of an error of ||G||^2 that all estimates share, so that their scatter does not show it."""
        self.shards = Ranks.alone()
        """Ranks whose estimates add up, each from its own part; all of them then read at the same time."""
        self.forget()

    def forget(self) -> None:
        """Drop all estimates."""
        self.num_samples: int | Tensor = 0
        """Samples that were looked at, and are in an estimate or between two."""
        self.skipped_samples = 0
        """Samples that are in no estimate, since gradients were not finite or the loop made no step on them."""
        self._waiting: list[StepEstimate] = []
        """Estimates that are to be read and averaged."""
        self._first: Any = np.zeros(())
        """Sum of w * (1, trace, sq_norm, ...)."""
        self._second: Any = np.zeros(())
        """Sum of w^2 times the outer product of the same with itself."""
        self._between: Any = np.zeros(())
        """The same products of each row with the `overlap` ones before it, the nearer the more."""
        self._recent: list[Any] = []
        """These rows, times their weights, the newest first."""

    def add_step(self, estimate: StepEstimate) -> None:
        """Add an estimate whose norms stay on the device until somebody reads the mean, or many wait."""
        self._waiting.append(estimate)
        # A bound on the memory of what waits; when they are read changes no result, as they are summed in step order.
        if len(self._waiting) >= MOST_WAITING:
            self._read_waiting()

    def _read_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            # One look at the device for all, and one sum over ranks that hold shards.
            values = iter(self.shards.sum_numbers(read([part for each in waiting for part in each.parts])))
            rows = [each.numbers(list(itertools.islice(values, len(each.parts)))) for each in waiting]
            self.extend([pair for _, *pair in rows], [weight for weight, *_ in rows])

    def extend(self, pairs: Iterable[Sequence[float]], weights: Iterable[float]) -> None:
        """Add estimates in turn. A weight of zero counts for nothing, whatever the pair holds."""
        with np.errstate(all="ignore"):  # what is not finite stays so, as in torch
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
        """Add the products of `row` with those before it, which have faded since."""
        self._recent = [each * self.decay for each in self._recent]
        if self._recent:
            # Newey and West's weights: neighbours have gradients in common, and with these the variance stays positive.
            near = sum((1 - distance / (self.overlap + 1)) * each for distance, each in enumerate(self._recent, 1))
            self._between = self._between * self.decay**2 + np.outer(row, near)
        self._recent = [row, *self._recent][: self.overlap]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to average; waits for the device."""
        self._read_waiting()
        return not self._first.flat[0] > 0

    def diversity(self) -> Diversity:
        """Return the means and their spread; waits for the device."""
        self._read_waiting()
        total, *sums = self._first.tolist()
        trace, sq_norm, *inner = means = [each / total for each in sums]
        spread = self._with_shared_error(self._spread(total, trace, sq_norm), means)
        if sq_norm < 0 and not self._trusts_negative:
            # A biased estimate below zero says nothing of the noise scale: the interval gets no ends.
            spread = replace(spread, sq_norm_variance=math.inf)
        found = Diversity.from_noise(trace, sq_norm, int(self.num_samples), spread=spread)
        inner_variance = inner[0] if inner and math.isfinite(inner[0]) else None
        return replace(found, inner_variance=inner_variance, skipped_samples=self.skipped_samples)

    def over(self, ranks: Ranks) -> "PairAverage":
        """Return the mean over all ranks together, if each saw samples of its own; a collective."""
        if ranks.is_alone:
            return self
        states = ranks.gather(self.state_dict())
        total = PairAverage(decay=self.decay)
        # A rank without any estimate has a plain zero, which goes with every shape.
        total._first, total._second = (sum(np.array(state[key]) for state in states) for key in ("first", "second"))
        total.num_samples = sum(state["num_samples"] for state in states)
        total.skipped_samples = sum(state["skipped_samples"] for state in states)
        return total

    def unknown(self) -> Diversity:
        """Return the answer without any estimate: every noise scale is possible."""
        nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
        num_samples = max(1, int(self.num_samples))
        return Diversity(math.nan, math.nan, num_samples, nothing, skipped_samples=self.skipped_samples)

    def _spread(self, total: float, trace: float, sq_norm: float) -> Spread:
        """Estimate the spread from each estimate's distance to the mean, also if some are less exact than others."""
        second = self._second
        products = (second + self._between + self._between.T)[:3, :3]
        to_mean = np.array([[-trace, 1.0, 0.0], [-sq_norm, 0.0, 1.0]])
        scatter = to_mean @ products @ to_mean.T
        ratio = float(second[0, 0]) / total**2  # one over the number of estimates, if they weigh alike
        fitted = float(products[0, 0]) / total**2  # what the mean took up of it, were they independent
        # A single estimate leaves nothing to judge by: a tiny divisor instead of none.
        covariance = (scatter / total**2 / max(1 - fitted, 1e-9)).tolist()
        return Spread(
            trace_variance=max(0.0, covariance[0][0]),
            sq_norm_variance=max(0.0, covariance[1][1]),
            covariance=covariance[0][1],
            # Fewer where some estimates weigh more than others; Student's t then widens the interval.
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
        """Continue with saved sums, which the first rank takes over."""
        self.forget()
        if not is_first:
            return
        self._first, self._second = np.array(state["first"]), np.array(state["second"])
        self.num_samples, self.skipped_samples = state["num_samples"], state["skipped_samples"]
        self._between = np.array(state["between"])
        self._recent = [np.array(each) for each in state["recent"]][: self.overlap]
        self.bounds_below = state["bounds_below"]


class AveragedEstimator(Estimator):
    """An estimator that averages pairs (tr(Sigma), ||G||^2) of single steps, each at its own weights, over an epoch.

    The interval comes from the scatter between steps, to which the weights' way through the epoch adds. If ranks share
    the batches and each estimates from its own samples, the mean is over all ranks. If decisions come within epochs,
    each sees the steps since the last one; an exponential mean continues through them.

    A class built on this fills `_average` between `_attach` and `_detach`.

    Args:
        decay: Below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        every_steps: Steps from one estimate to the next.
    """

    nothing_seen: ClassVar[str]
    """The error if a whole epoch showed nothing."""
    may_see_nothing: ClassVar[bool] = False
    """Whether an epoch with too few steps for an estimate is no error."""
    sees_all_ranks: ClassVar[bool] = False
    """Whether each rank sees what all saw together, so that estimates are not averaged over ranks."""
    trusts_negative: ClassVar[bool] = True
    """Whether its ||G||^2 is unbiased, so that an interval holds also if it came out below zero."""

    def __init__(self, *, decay: float = 1.0, every_steps: int = 1) -> None:
        require_count("every_steps", every_steps)
        self._decay, self._every_steps = PairAverage(decay=decay).decay, every_steps
        # Each decision must see two estimates; an exponential mean goes through them.
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
        """Begin to watch, and fill `average` from then on."""

    @abstractmethod
    def _detach(self) -> None:
        """Take all hooks off and free all memory."""

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
        # Those of all ranks, so that the number of ranks may change at a resume.
        return {"estimates": self._average.over(self._ranks()).state_dict(), "was_read": self._was_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at_work().load_state_dict(state["estimates"], is_first=self._ranks().is_first)
        self._was_read = state["was_read"]

    def _seen(self) -> Diversity:
        average = self._at_work().over(self._ranks())
        if not average.is_empty:
            return average.diversity()
        # A few steps may show nothing, a last batch of one sample for instance; a whole epoch should have.
        too_few = self.may_see_nothing and average.num_samples
        if self._was_read or too_few or average.skipped_samples:
            return average.unknown()
        raise UsageError(self.nothing_seen)

    def _ranks(self) -> Ranks:
        """Return the ranks whose estimates must be averaged, since each sees samples of its own."""
        # Gradients that DDP has averaged are alike on all ranks: adding them up would count them several times.
        return Ranks.alone() if self.sees_all_ranks else self.context.loader.ranks

    def _at_work(self) -> PairAverage:
        if self._average is None:
            raise UsageError("this estimator measures nothing now: bind() comes first, and then start()")
        return self._average
