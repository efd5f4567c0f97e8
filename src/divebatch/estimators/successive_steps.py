"""Watches optimizer steps and lets their gradients be compared, step by step."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.estimators.average import PairAverage
from divebatch.estimators.comparisons import Comparison
from divebatch.estimators.estimator import NoiseSeen, Scene
from divebatch.estimators.lagged_products import LaggedRow
from divebatch.estimators.optimizer_events import DropWatch, scale_of_gradients, when_gradients_are_used
from divebatch.estimators.second_moment import Preconditioner
from divebatch.estimators.step_gradients import StepGradients
from divebatch.estimators.stepwise import Source
from divebatch.norms.accumulators import trainable
from divebatch.norms.sharded import Shards


class Way(Protocol):
    """A way to compare gradients: makes the comparison of an epoch, and makes it again at a resume."""

    @property
    def name(self) -> str:
        """The estimator's."""
        ...

    @property
    def added_noise(self) -> NoiseSeen:
        """Where noise that was added to gradients on purpose shows: see `Estimator.added_noise`."""
        ...

    def prepare(self, scene: Scene) -> None:
        """Raise if the scene has not what this way needs."""
        ...

    def caveat(self, optimizer: Optimizer) -> str:
        """Say why policies will not act on what this shows; empty where they will."""
        ...

    def preconditioner(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Preconditioner | None:
        """What divides gradients before they are compared."""
        ...

    def start(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, *, seed: int
    ) -> tuple[Comparison, dict[str, Any]]:
        """A comparison with nothing in it, and what `resume` must be told to make the same."""
        ...

    def resume(
        self, made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> Comparison:
        """A comparison made as another was, whatever the settings are here."""
        ...


class SuccessiveSteps(Source):
    """The gradients of successive optimizer steps, compared by one way or another."""

    nothing_seen = "the epoch has ended, but no optimizer step on a batch of the loader was seen in it"
    may_see_nothing = True  # large batches leave an epoch with a step or two
    takes_replays = True  # no pass has to be seen where no step is skipped

    def __init__(self, way: Way, *, every_steps: int) -> None:
        self._way, self.every_steps = way, every_steps
        self.added_noise = way.added_noise

    def prepare(self, scene: Scene) -> None:
        scene.require_optimizer(self._way.name)
        self._way.prepare(scene)

    def caveat(self, scene: Scene) -> str:
        return self._way.caveat(scene.require_optimizer(self._way.name))

    def attach(self, scene: Scene, decay: float) -> PairAverage:
        self._scene, self._optimizer = scene, scene.require_optimizer(self._way.name)
        self._parameters = trainable(scene.model)
        self._shards = Shards(self._parameters)
        self._preconditioner = self._way.preconditioner(self._optimizer, self._parameters)
        # The weights move between the compared steps, and that bias can carry ||G||^2 below zero.
        self._average = PairAverage(decay=decay, trusts_negative=False)
        self._average.shards = self._shards.ranks
        # The samples so far are the same on all ranks, so their signs are, and other ones in each epoch.
        seed = scene.delivery.samples_delivered
        self._use(*self._way.start(self._parameters, self._optimizer, seed=seed))
        self._stepped = self._passed = scene.delivery.samples_delivered
        """Samples that had been delivered at the last optimizer step, and at the last backward pass."""
        self._pause = 0
        """Steps to come that are not looked at."""
        self._stop = when_gradients_are_used(scene, self._way.name, self._on_step, reads_gradients=True)
        self._drops = DropWatch(scene.model, self._on_drop, self._on_pass)
        return self._average

    def detach(self) -> None:
        self._stop()
        self._drops.close()
        del self._chunks, self._average  # which holds the chunks too, by what widens its spread

    def _use(self, comparison: Comparison, made_with: dict[str, Any]) -> None:
        self._chunks, self._made_with = comparison, made_with
        # Where there is an estimate a step, it has gradients in common with those before.
        self._average.reach = comparison.reach if self.every_steps == 1 else 0
        self._average.bounds_below, self._average.widen = comparison.bounds_below, comparison.widened
        self._average.has_inner_variance = comparison.has_inner_variance

    def _on_pass(self) -> None:
        self._passed = self._scene.delivery.samples_delivered

    def _on_drop(self) -> None:
        """What was delivered up to the last pass is in no gradient any more."""
        dropped = max(0, self._passed - self._stepped)
        self._stepped += dropped
        self._average.skipped_samples = self._average.skipped_samples + dropped

    def _on_step(self, optimizer: Optimizer) -> None:
        self._drops.stepped()
        size = self._scene.delivery.samples_delivered - self._stepped
        if size and self._pause:
            self._stepped += size
            self._pause -= 1
            self._average.num_samples = self._average.num_samples + size
            return
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if size == 0 or not gradients:
            return
        self._stepped += size
        if math.isfinite(scale := scale_of_gradients(optimizer)):
            self._add(gradients, size, scale)
        else:  # a GradScaler's overflow: the optimizer will skip this step, so it is in no estimate
            self._average.skipped_samples = self._average.skipped_samples + size

    def _add(self, gradients: dict[str, Tensor], size: int, grad_scale: float) -> None:
        # A mean over ranks of sums over their samples is the whole sum over the number of ranks.
        to_mean = 1.0 if self._scene.loss_reduction == "mean" else self._scene.delivery.ranks.size / size
        self._average.num_samples = self._average.num_samples + size
        step = StepGradients(
            self._shards.of(gradients),
            scale=to_mean,
            grad_scale=grad_scale,
            preconditioner=self._preconditioner,
            offsets=self._shards.offsets,
        )
        if step.is_empty:
            return
        self._chunks.add_step(step, size)
        if self._chunks.num_chunks < self._chunks.needed:
            return
        row = self._chunks.row()
        # Momentum may have fallen since: OneCycleLR moves it, and so does lr_coupling="adam" with the batch size.
        if isinstance(row, LaggedRow) and row.factor == 0:
            self._average.bounds_below = False
        self._average.add_row(row)
        self._pause = max(0, self.every_steps - self._chunks.needed)
        if not self._chunks.reach or self.every_steps > 1:
            self._chunks.forget()

    def state_dict(self) -> dict[str, Any]:
        return {
            "chunks": self._chunks.state_dict(),
            "made_with": self._made_with,
            "since_step": self._scene.delivery.samples_delivered - self._stepped,
            "pause": self._pause,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made_with = state["made_with"]
        if made_with != self._made_with:  # other signs, or the optimizer's momentum is not loaded yet
            self._use(self._way.resume(made_with, self._parameters, self._optimizer), made_with)
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]
        self._pause = state["pause"]
        if all(p.grad is None for p in self._parameters.values()):  # a gradient under way was not saved
            self._stepped = self._scene.delivery.samples_delivered
