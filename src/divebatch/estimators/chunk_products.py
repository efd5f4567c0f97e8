"""Several steps compared as chunks of one large batch, by sketches of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from divebatch.estimators.average import Norms, inner_variance, read, unbiased
from divebatch.estimators.fused_sketch import ByKernel, sketch_of
from divebatch.estimators.gradient_sketch import SignSketch, with_shared_error
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Two or more chunks of samples, by the squared norms of their mean gradients and by products."""

    sizes: Sequence[int]
    """Samples of each chunk."""
    sq_norms: Sequence[Norms]
    """||g||^2 of each chunk."""
    products: Sequence[Norms]
    """Of each chunk but the first: <g, the sum of gradients over all samples before>."""

    @property
    def num_samples(self) -> int:
        """Samples in all chunks."""
        return sum(self.sizes)

    @property
    def parts(self) -> list[Norms]:
        """All that is to be read."""
        return [*self.sq_norms, *self.products]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float, float]:
        """tr(Sigma), ||G||^2, Var_i<g_i, g> and what of the first was taken off for the second."""
        count, total, (*_, last) = len(self.sizes), self.num_samples, self.sizes
        own, products, rest = values[:count], values[count:], self.num_samples - last
        singles = [size**2 * square for size, square in zip(self.sizes, own, strict=True)]
        doubles = [2 * size * product for size, product in zip(self.sizes[1:], products, strict=True)]
        mean = (sum(singles) + sum(doubles)) / total**2
        before = (sum(singles[:-1]) + sum(doubles[:-1])) / rest**2
        weighted = sum(size * square for size, square in zip(self.sizes, own, strict=True))
        trace, sq_norm = unbiased(weighted, mean, count, total)
        inner = inner_variance((before, own[-1]), (rest, last), mean)
        # All of the mean that depends on products is (1 - sum of (size / total)^2) ||G||^2.
        by_products = 1 - sum(size**2 for size in self.sizes) / total**2
        return trace, sq_norm, inner, sq_norm * by_products * total / (count - 1)


class SketchedChunks:
    """The steps of a window, as a sketch of their sum."""

    reach, bounds_below, has_inner_variance = 0, False, True

    def __init__(self, signs: SignSketch, window: int) -> None:
        self.needed = window
        self._signs, self._by_kernel = signs, ByKernel(signs)
        self.forget()

    def forget(self) -> None:
        """Drop all steps."""
        self._sizes: list[int] = []
        self._sq_norms: list[Norms] = []
        self._products: list[Norms] = []
        self._sum: Any = None

    @property
    def num_chunks(self) -> int:
        """Steps so far."""
        return len(self._sizes)

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """The spread with what the sketch's error adds that all steps share."""
        return with_shared_error(spread, means, self._signs.relative_variance)

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """A step on `num_samples` samples."""
        sketch, sq_norm = sketch_of(self._signs, step, self._by_kernel)
        if self._sum is None:
            self._sum = sketch.mul_(num_samples)
        else:
            self._products.append(self._signs.shards.part(self._sum.dot(sketch)))
            self._sum.add_(sketch, alpha=num_samples)
        self._sizes.append(num_samples)
        self._sq_norms.append(sq_norm)

    def row(self) -> ProductRow:
        """The row of two or more steps."""
        return ProductRow(self._sizes, self._sq_norms, self._products)

    def state_dict(self) -> dict[str, Any]:
        """The sketch of steps that wait for more."""
        numbers = self._signs.shards.summed(read([*self._sq_norms, *self._products]))
        return {
            "sizes": list(self._sizes),
            "sq_norms": numbers[: self.num_chunks],
            "products": numbers[self.num_chunks :],
            "sum": None if self._sum is None else self._sum.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved sketch."""
        share = self._signs.shards.share
        self._sizes, self._sq_norms = list(state["sizes"]), [*share(state["sq_norms"])]
        self._products = [*share(state["products"])]
        self._sum = None if state["sum"] is None else state["sum"].to(self._signs.device, copy=True)
