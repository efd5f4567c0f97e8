"""Deliveries and steps for an estimator in a loop that has no loader or no controller."""

from collections.abc import Callable, Iterable
from typing import Any

from divebatch.estimators import Estimator, Scene
from divebatch.estimators.step_hooks import tell_steps
from divebatch.measurement import StepEvent
from divebatch.ranks import Ranks, RankShard


class Delivered:
    """Batches whose sizes show in a count of all samples so far, which the loop keeps."""

    ranks = Ranks.alone()

    def __init__(self, count: Callable[[], int], full_pass: Callable[[], Iterable[Any]] = list) -> None:
        self._count, self.full_pass = count, full_pass
        self._before, self._size, self._batches = count(), 0, 0

    @property
    def batches_delivered(self) -> int:
        self.look()
        return self._batches

    @property
    def samples_delivered(self) -> int:
        self.look()
        return self._before

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    @property
    def rank_shard(self) -> RankShard:
        self.look()
        return RankShard(self._size, self._size)

    def look(self) -> None:
        """Take what came since the last look for one batch."""
        now = self._count()
        if now != self._before:
            self._size, self._before, self._batches = now - self._before, now, self._batches + 1


class _WhileAtWork(Estimator):
    """Passes steps on to the estimator that is at work, as a controller does."""

    def __init__(self, current: Callable[[], Estimator]) -> None:
        self._current = current

    def bind(self, scene: Scene) -> None:
        raise NotImplementedError

    def finish(self) -> Any:
        raise NotImplementedError

    def on_step(self, event: StepEvent, optimizer: Any) -> None:
        estimator = self._current()
        if getattr(estimator, "_average", estimator) is not None:
            estimator.on_step(event, optimizer)


def tell(current: Callable[[], Estimator], scene: Scene, *, accumulate: Callable[[], int] = lambda: 1) -> None:
    """Tell whichever estimator is the current one of each step, while it is at work."""
    tell_steps(_WhileAtWork(current), scene, accumulate=accumulate)


def attach(estimator: Estimator, scene: Scene) -> None:
    """Bind an estimator and tell it of steps from then on."""
    estimator.bind(scene)
    if scene.optimizer is not None:
        tell(lambda: estimator, scene)
