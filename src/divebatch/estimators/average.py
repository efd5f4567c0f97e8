"""Means of many small unbiased estimates, with the spread that belongs to them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity, Spread
from divebatch.ranks import Ranks


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


class PairAverage:
    """The weighted mean of pairs (tr(Sigma), ||G||^2), averaged apart: the mean of their ratios would be biased.

    A third number may come with each pair: the variance of <g_i, g>.

    With `decay` below 1 earlier pairs fade by it at each new one: an exponential mean. It is divided by the sum of its
    weights, so its start does not pull it towards zero. Sums stay on the device they come from until they are read, and
    nothing is sent there: a copy from the host would wait for all that a GPU still has to do.

    `reach` is for estimates that share gradients with as many of those before them, and come by `extend`: the spread
    counts their products too, the less the farther apart they are, so that it stays positive (Newey and West 1987).
    """

    def __init__(self, *, decay: float = 1.0, reach: int = 0) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got decay={decay!r}")
        self.decay, self.reach = float(decay), reach
        self.num_samples: int | Tensor = 0
        self._first = torch.zeros((), dtype=torch.float64)
        """Sum of w * (1, trace, sq_norm, ...)."""
        self._second = torch.zeros((), dtype=torch.float64)
        """Sum of w^2 times the outer product of the same with itself."""
        self._between = np.zeros(())
        """The same of each with those within `reach` before it, the nearer the more."""
        self._recent: list[Any] = []
        """Those, times their weights, the newest first."""

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

    def extend(self, pairs: Iterable[Sequence[float]], weights: Iterable[float]) -> None:
        """`add` of each in turn, for numbers that are on the host."""
        first, second = self._first.cpu().numpy(), self._second.cpu().numpy()
        with np.errstate(all="ignore"):  # what is not finite stays so, as in torch
            for pair, weight in zip(pairs, weights, strict=True):
                row = np.array((1.0, *pair)) * weight if weight > 0 else np.zeros(1 + len(pair))
                first, second = first * self.decay + row, second * self.decay**2 + np.outer(row, row)
                self._relate(row)
        self._first, self._second = torch.from_numpy(np.asarray(first)), torch.from_numpy(np.asarray(second))

    def _relate(self, row: Any) -> None:
        """To those before it, which have faded since."""
        self._recent = [each * self.decay for each in self._recent]
        if self._recent:
            near = sum((1 - distance / (self.reach + 1)) * each for distance, each in enumerate(self._recent, 1))
            self._between = self._between * self.decay**2 + np.outer(row, near)
        self._recent = [row, *self._recent][: self.reach]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to average; waits for the device."""
        return not float(self._first.flatten()[0]) > 0

    def diversity(self) -> Diversity:
        """The means and their spread; waits for the device."""
        total, *sums = self._first.tolist()
        trace, sq_norm, *inner = (each / total for each in sums)
        spread = self._spread(total, trace, sq_norm)
        diversity = Diversity.from_noise(trace, sq_norm, int(self.num_samples), spread=spread)
        return replace(diversity, inner_variance=inner[0]) if inner and math.isfinite(inner[0]) else diversity

    def over(self, ranks: Ranks) -> "PairAverage":
        """Of all ranks together, where each saw samples of its own; a collective."""
        states = ranks.gather(self.state_dict())
        total = PairAverage(decay=self.decay)
        total._first, total._second = (  # a rank without any estimate has a plain zero, which goes with every shape
            torch.stack(torch.broadcast_tensors(*(torch.tensor(s[key], dtype=torch.float64) for s in states))).sum(0)
            for key in ("first", "second")
        )
        total.num_samples = sum(state["num_samples"] for state in states)
        return total

    def unknown(self) -> Diversity:
        """What no estimate at all says: any noise scale is possible."""
        nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
        return Diversity(math.nan, math.nan, max(1, int(self.num_samples)), nothing)

    def _spread(self, total: float, trace: float, sq_norm: float) -> Spread:
        """From the distance of each estimate to the mean: right also where some are less exact than others."""
        second = self._second.cpu()
        products = (second + torch.from_numpy(np.asarray(self._between + self._between.T)))[:3, :3]
        to_mean = torch.tensor([[-trace, 1.0, 0.0], [-sq_norm, 0.0, 1.0]], dtype=torch.float64)
        scatter = to_mean @ products @ to_mean.T
        share = float(second[0, 0]) / total**2  # one over the number of estimates, if they weigh alike
        fitted = float(products[0, 0]) / total**2  # what the mean took up of it, were they independent
        covariance = (scatter / total**2 / max(1 - fitted, 1e-9)).tolist()
        return Spread(
            trace_variance=max(0.0, covariance[0][0]),
            sq_norm_variance=max(0.0, covariance[1][1]),
            covariance=covariance[0][1],
            degrees=1 / share - 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain numbers."""
        return {
            "first": self._first.tolist(),
            "second": self._second.tolist(),
            "num_samples": int(self.num_samples),
            "between": self._between.tolist(),
            "recent": [each.tolist() for each in self._recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        self._first = torch.tensor(state["first"], dtype=torch.float64)
        self._second = torch.tensor(state["second"], dtype=torch.float64)
        self.num_samples = state["num_samples"]
        self._between = np.array(state.get("between", 0.0))  # not in states of before
        self._recent = [np.array(each) for each in state.get("recent", [])][: self.reach]
