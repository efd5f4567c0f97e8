"""Noise that is added to gradients on purpose, and how much of it there is in what an estimator sees."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.estimator import Estimator, Scene
from divebatch.estimators.optimizer_events import scale_of_gradients, when_gradients_are_used


class NoiseSource(Protocol):
    """Adds noise of mean zero to a model's gradients, after their backward pass and before the optimizer's step."""

    def take_variance(self) -> Tensor | float:
        """Return E||e||^2 of what this rank added to the gradients at hand, in their units; the next call counts anew.

        Ranks draw independently, and their gradients are averaged.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the draws to come depend on; the same on all ranks."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        ...


# By parameter and not by model, which may be wrapped or compiled before a controller sees it.
_SOURCES = WeakTensorKeyDictionary()


def announce(parameters: Iterable[nn.Parameter], source: NoiseSource) -> Callable[[], None]:
    """Let controllers know that `source` adds noise to these parameters' gradients; returns what ends that."""
    # Found by controllers and not passed to them: noise that one was not told of would pass for the data's.
    places = [_SOURCES.setdefault(parameter, []) for parameter in parameters]
    for sources in places:
        sources.append(source)

    def end() -> None:
        for sources in places:
            if source in sources:
                sources.remove(source)

    return end


def sources_on(model: nn.Module) -> tuple[NoiseSource, ...]:
    """Return what adds noise to gradients of `model`."""
    found = (source for parameter in model.parameters() for source in _SOURCES.get(parameter, ()))
    return tuple({id(source): source for source in found}.values())


def require_told_apart(estimator: Estimator, sources: Sequence[NoiseSource]) -> None:
    """Raise for an estimator that would take added noise for the data's."""
    if sources and estimator.added_noise == "mixed":
        raise ArgumentError(
            f"{type(sources[0]).__name__} adds noise to the gradients, and {type(estimator).__name__} as it is set "
            f"cannot tell it from the data's: use estimator='split' or 'per-sample', or Moments() without decay and "
            f"preconditioning"
        )


class AddedNoise:
    """Counts the variance that is added to the gradients of the steps of an epoch, as if each sample had its part.

    A step on b samples whose mean gradient got noise of variance V is one whose samples got b V each. Nothing is done
    where nothing adds noise.

    Args:
        scene: Has the model, the optimizers that step, and the loader that counts samples.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._sources: tuple[NoiseSource, ...] = ()
        self._stop: Callable[[], None] | None = None
        self._forget()

    def start(self, estimator: Estimator) -> None:
        """Begin to count, for `estimator`."""
        self.close()
        self._sources = sources_on(self._scene.model)
        require_told_apart(estimator, self._sources)
        if self._sources:
            self._forget()
            self._take_variance()
            self._stepped = self._scene.delivery.samples_delivered
            self._stop = when_gradients_are_used(self._scene, "added noise", self._on_step, reads_gradients=False)

    def close(self) -> None:
        """Stop counting."""
        if self._stop is not None:
            self._stop()
        self._stop = None

    def take(self) -> float | None:
        """Return the variance per sample since the last call, or since the start; None where nothing adds noise.

        A collective, where there are ranks and noise.
        """
        if self._sources != sources_on(self._scene.model):
            raise UsageError(
                "something began or ceased to add noise to the gradients within an epoch that is measured: attach it "
                "before the epoch's first batch, and close it after control.step()"
            )
        if not self._sources:
            return None
        total, samples = self._over_ranks(), self._samples
        self._forget()
        return total / samples if samples else 0.0

    def _forget(self) -> None:
        self._total: Tensor | float = 0.0
        """Sum over steps of b^2 V, of this rank's noise."""
        self._samples = 0

    def _on_step(self, optimizer: Optimizer) -> None:
        size = self._scene.delivery.samples_delivered - self._stepped
        if size == 0:
            return
        self._stepped += size
        variance, scale = self._take_variance(), scale_of_gradients(optimizer)
        if not math.isfinite(scale):  # a GradScaler's overflow: no step is made
            return
        world = self._scene.delivery.ranks.size
        to_mean = 1.0 if self._scene.loss_reduction == "mean" else world / size
        self._total = self._total + variance * (size * to_mean / scale / world) ** 2
        self._samples += size

    def _take_variance(self) -> Tensor | float:
        """That of gradients which are not finite counts as none: estimators leave them out."""
        variance = sum(source.take_variance() for source in self._sources)
        return variance.nan_to_num(0.0, 0.0, 0.0) if isinstance(variance, Tensor) else variance

    def _over_ranks(self) -> float:
        total = torch.tensor([float(self._total)], dtype=torch.float64)
        self._scene.delivery.ranks.sum_([total])
        return total.item()

    def state_dict(self) -> dict[str, Any]:
        """The sums of all ranks, and the state of what adds noise; a collective where there are ranks and noise."""
        sources = sources_on(self._scene.model)
        total = self._over_ranks() if self._sources else 0.0
        return {"total": total, "samples": self._samples, "sources": [source.state_dict() for source in sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums, which the first rank takes over; called after `start`."""
        for source, saved in zip(sources_on(self._scene.model), state["sources"], strict=True):
            source.load_state_dict(saved)
        if self._sources:
            self._total = state["total"] if self._scene.delivery.ranks.is_first else 0.0
            self._samples = state["samples"]
