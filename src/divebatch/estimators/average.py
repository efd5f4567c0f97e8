"""Means of many small unbiased estimates, with the spread that belongs to them.

On a GPU each operation on a single number is a launch like any other. So nothing is computed with the norms of a step
before they are read, many steps at once, and then on the host.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity, Spread
from divebatch.ranks import Ranks

COLUMNS = (3, 4, 5)
"""Numbers of an estimate with its weight: of a pair, with the variance of <g_i, g>, and with what widens the spread."""
MOST_WAITING = 512
"""Rows whose norms may lie on the device unread."""

Norms = Tensor | float
"""Norms of several tensors, one each, where they were computed; or, once read, the sum of their squares. Also a number
by itself, such as a product of two gradients, which is the same before and after."""


def norms_of(tensors: Sequence[Tensor]) -> Norms:
    """The norm of each tensor, by two operators on the device."""
    return torch.stack(torch._foreach_norm(list(tensors))) if tensors else 0.0


def read(many: Sequence[Norms]) -> list[float]:
    """The sums of squares, and numbers by themselves, in float64. Waits for the device, once for all of one kind."""
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
    """(tr(Sigma), ||G||^2) from the mean gradients of two or more chunks of samples at the same weights.

    `weighted_sq_norms` is the sum over chunks of s_j ||g_j||^2, s_j samples with the mean gradient g_j, and
    `sq_norm_of_mean` is ||sum_j s_j g_j / b||^2 over all b = `num_samples`. Chunks may differ in size. Single samples
    are chunks of one, so per-sample norms give the same formula. Numbers, or tensors of them.
    """
    trace = (weighted_sq_norms - num_samples * sq_norm_of_mean) / (num_chunks - 1)
    return trace, sq_norm_of_mean - trace / num_samples


def inner_variance(sq_norms: tuple[float, float], sizes: tuple[int, int], sq_norm_of_mean: float) -> float:
    """Var_i<g_i, g> over samples, from the squared norms of two chunks' mean gradients and of their common mean g.

    <g_1 - g_2, g> has the variance of one sample times 1/s_1 + 1/s_2, and mean zero. It follows from norms alone.
    """
    (first, second), (size, other) = sq_norms, sizes
    between = ((size + other) ** 2 * sq_norm_of_mean - size**2 * first - other**2 * second) / (2 * size * other)
    inner = (size * first - other * second + (other - size) * between) / (size + other)
    return inner * inner * size * other / (size + other)


class Readable(Protocol):
    """What one step showed, or a few: numbers on the device that an estimate is made from."""

    @property
    def num_samples(self) -> int:
        """Samples that it was made from, by which it is weighted."""
        ...

    @property
    def parts(self) -> Sequence[Norms]:
        """All that is to be read."""
        ...

    def numbers(self, values: Sequence[float]) -> tuple[float, ...]:
        """tr(Sigma), ||G||^2, Var_i<g_i, g> and what else is averaged, from what `parts` were read as."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """The mean gradients of two or more chunks of samples at the same weights."""

    sizes: Sequence[int]
    """Samples of each chunk."""
    factors: Sequence[float]
    """Factors that the squared norm of each chunk is to be multiplied by."""
    norms: Sequence[Norms]
    """Norms of each chunk's gradients."""
    of_sum: Norms
    """Norms of the sum of gradients over all samples."""
    before_last: Norms | None
    """Norms of the sum that the last chunk was added to; None where that was the first chunk."""

    @property
    def num_samples(self) -> int:
        """Samples in all chunks."""
        return sum(self.sizes)

    @property
    def parts(self) -> list[Norms]:
        """All that is to be read."""
        return [*self.norms, self.of_sum, *([] if self.before_last is None else [self.before_last])]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float]:
        """tr(Sigma), ||G||^2 and Var_i<g_i, g>, from what `parts` were read as."""
        count, total = len(self.sizes), self.num_samples
        of_chunks = [factor * square for factor, square in zip(self.factors, values[:count], strict=True)]
        mean, last = values[count] / total**2, self.sizes[-1]
        weighted = sum(size * square for size, square in zip(self.sizes, of_chunks, strict=True))
        before = self.sizes[0] ** 2 * of_chunks[0] if self.before_last is None else values[count + 1]
        rest = total - last
        inner = inner_variance((before / rest**2, of_chunks[-1]), (rest, last), mean)
        return (*unbiased(weighted, mean, count, total), inner)


def numbers_of(rows: Sequence[Readable], shards: Ranks | None = None) -> Iterator[tuple[float, ...]]:
    """The numbers of each row, in order; one look at the device for all, and one sum over ranks that hold shards."""
    found = read([part for row in rows for part in row.parts])
    values = iter(found if shards is None or shards.is_alone else shards.sum_numbers(found))
    for row in rows:
        yield row.numbers(list(itertools.islice(values, len(row.parts))))


class PairAverage:
    """The weighted mean of pairs (tr(Sigma), ||G||^2), averaged apart: the mean of their ratios would be biased.

    A third number may come with each pair: the variance of <g_i, g>, if `has_inner_variance`. Those after it are
    averaged for `widen` alone.

    With `decay` below 1 earlier pairs fade by it at each new one: an exponential mean. It is divided by the sum of its
    weights, so its start does not pull it towards zero. Sums stay on the device they come from until they are read, and
    nothing is sent there: a copy from the host would wait for all that a GPU still has to do.

    `reach` is for estimates that have gradients in common with as many of those before them, and come by `extend`: the
    spread counts their products too, the less the farther apart they are, so that it stays positive (Newey and West
    1987).

    An estimate that is not made of finite numbers counts for nothing; its samples go from `num_samples` to
    `skipped_samples`.

    `trusts_negative=False` is for estimates whose bias may carry ||G||^2 below zero: the interval then has no ends.
    Where `bounds_below` is set to False, an unknown bias makes noise scales too large: the interval then goes to zero.
    `widen` gets the spread and the means of all numbers, and adds what the scatter between estimates does not show.
    """

    def __init__(self, *, decay: float = 1.0, reach: int = 0, trusts_negative: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got decay={decay!r}")
        self.decay, self.reach, self._trusts_negative = float(decay), reach, trusts_negative
        self.bounds_below, self.has_inner_variance = True, True
        self.widen: Callable[[Spread, Sequence[float]], Spread] = lambda spread, _: spread
        self.shards = Ranks.alone()
        """Ranks whose rows are those of their shards and add up; all of them then read at the same time."""
        self.forget()

    def forget(self) -> None:
        """Drop all estimates."""
        self.num_samples: int | Tensor = 0
        """Samples that were looked at, and are in an estimate or between two."""
        self.skipped_samples: int | Tensor = 0
        """Samples that are in no estimate, since gradients were not finite or the loop made no step on them."""
        self._waiting: list[Readable] = []
        """Rows that are to be read and averaged."""
        self._first = torch.zeros((), dtype=torch.float64)
        """Sum of w * (1, trace, sq_norm, ...)."""
        self._second = torch.zeros((), dtype=torch.float64)
        """Sum of w^2 times the outer product of the same with itself."""
        self._between = np.zeros(())
        """The same products of each row with those within `reach` before it, the nearer the more."""
        self._recent: list[Any] = []
        """The rows within `reach`, times their weights, the newest first."""

    def add(self, pair: Tensor, weight: Any) -> None:
        """One more estimate. A weight of zero counts for nothing, whatever the pair holds."""
        if isinstance(weight, Tensor):
            weight = weight.to(pair.device)
            pair = torch.where(weight > 0, pair, 0.0)
        elif not weight > 0:
            pair = torch.zeros_like(pair)
        row = torch.cat([torch.ones_like(pair[:1]), pair]) * weight
        squares = torch.outer(row, row)
        if self._first.ndim:
            self._first = self._first.to(pair.device) * self.decay + row
            self._second = self._second.to(pair.device) * self.decay**2 + squares
        else:  # nothing yet, which need not be sent there
            self._first, self._second = row, squares

    def add_row(self, row: Readable) -> None:
        """One more estimate, whose norms stay on the device until somebody reads the mean, or many wait."""
        self._waiting.append(row)
        # A bound on the memory of what waits; when rows are read changes no result, as they are summed in step order.
        if len(self._waiting) >= MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        if self._waiting:
            rows, self._waiting = self._waiting, []
            self.extend(numbers_of(rows, self.shards), [row.num_samples for row in rows])

    def extend(self, pairs: Iterable[Sequence[float]], weights: Iterable[float]) -> None:
        """`add` of each in turn, for numbers that are on the host."""
        first, second = self._first.cpu().numpy(), self._second.cpu().numpy()
        with np.errstate(all="ignore"):  # what is not finite stays so, as in torch
            for pair, weight in zip(pairs, weights, strict=True):
                is_finite = all(map(math.isfinite, pair))
                if not is_finite:
                    self.leave_out(int(weight))
                row = np.array((1.0, *pair)) * weight if weight > 0 and is_finite else np.zeros(1 + len(pair))
                first, second = first * self.decay + row, second * self.decay**2 + np.outer(row, row)
                self._relate(row)
        self._first, self._second = torch.from_numpy(np.asarray(first)), torch.from_numpy(np.asarray(second))

    def leave_out(self, num_samples: int | Tensor) -> None:
        """So many of the samples that were looked at are in no estimate."""
        self.num_samples = self.num_samples - num_samples
        self.skipped_samples = self.skipped_samples + num_samples

    def _relate(self, row: Any) -> None:
        """Add the products of `row` with those before it, which have faded since."""
        self._recent = [each * self.decay for each in self._recent]
        if self._recent:
            # Newey and West's weights: neighbours have gradients in common, and with these the variance stays positive.
            near = sum((1 - distance / (self.reach + 1)) * each for distance, each in enumerate(self._recent, 1))
            self._between = self._between * self.decay**2 + np.outer(row, near)
        self._recent = [row, *self._recent][: self.reach]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to average; waits for the device."""
        self._settle()
        return not float(self._first.flatten()[0]) > 0

    def diversity(self) -> Diversity:
        """The means and their spread; waits for the device."""
        self._settle()
        total, *sums = self._first.tolist()
        trace, sq_norm, *inner = means = [each / total for each in sums]
        spread = self.widen(self._spread(total, trace, sq_norm), means)
        if sq_norm < 0 and not self._trusts_negative:
            # A biased estimate below zero says nothing of the noise scale: the interval gets no ends.
            spread = replace(spread, sq_norm_variance=math.inf)
        found = Diversity.from_noise(trace, sq_norm, int(self.num_samples), spread=spread)
        inner_variance = inner[0] if inner and self.has_inner_variance and math.isfinite(inner[0]) else None
        return replace(found, inner_variance=inner_variance, skipped_samples=int(self.skipped_samples))

    def over(self, ranks: Ranks) -> "PairAverage":
        """The mean over all ranks together, where each saw samples of its own; a collective."""
        if ranks.is_alone:
            return self
        states = ranks.gather(self.state_dict())
        total = PairAverage(decay=self.decay)
        total._first, total._second = (  # a rank without any estimate has a plain zero, which goes with every shape
            torch.stack(torch.broadcast_tensors(*(torch.tensor(s[key], dtype=torch.float64) for s in states))).sum(0)
            for key in ("first", "second")
        )
        total.num_samples = sum(state["num_samples"] for state in states)
        total.skipped_samples = sum(state["skipped_samples"] for state in states)
        return total

    def unknown(self) -> Diversity:
        """The answer without any estimate: every noise scale is possible."""
        nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
        skipped = int(self.skipped_samples)
        return Diversity(math.nan, math.nan, max(1, int(self.num_samples)), nothing, skipped_samples=skipped)

    def _spread(self, total: float, trace: float, sq_norm: float) -> Spread:
        """The spread from each estimate's distance to the mean: right also where some are less exact than others."""
        second = self._second.cpu()
        products = (second + torch.from_numpy(np.asarray(self._between + self._between.T)))[:3, :3]
        to_mean = torch.tensor([[-trace, 1.0, 0.0], [-sq_norm, 0.0, 1.0]], dtype=torch.float64)
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

    def average(self) -> "PairAverage":
        """Itself: see `Estimates`."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain numbers."""
        self._settle()
        return {
            "first": self._first.tolist(),
            "second": self._second.tolist(),
            "num_samples": int(self.num_samples),
            "skipped_samples": int(self.skipped_samples),
            "between": self._between.tolist(),
            "recent": [each.tolist() for each in self._recent],
            "bounds_below": self.bounds_below,
        }

    def load_state_dict(self, state: dict[str, Any], *, is_first: bool = True) -> None:
        """Go on with saved sums, which the first rank takes over."""
        self.forget()
        if not is_first:
            return
        self._first = torch.tensor(state["first"], dtype=torch.float64)
        self._second = torch.tensor(state["second"], dtype=torch.float64)
        self.num_samples, self.skipped_samples = state["num_samples"], state["skipped_samples"]
        self._between = np.array(state["between"], dtype=np.float64)
        self._recent = [np.array(each, dtype=np.float64) for each in state["recent"]][: self.reach]
        self.bounds_below = state["bounds_below"]
