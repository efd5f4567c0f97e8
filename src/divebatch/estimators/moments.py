"""An estimate from the batch gradients alone."""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from divebatch.estimators.average import PairAverage
from divebatch.estimators.comparisons import Comparing, Comparison, chunks_check
from divebatch.estimators.estimator import Scene
from divebatch.estimators.lagged_products import LaggedRow
from divebatch.estimators.optimizer_events import DropWatch, scale_of_gradients, when_gradients_are_used
from divebatch.estimators.second_moment import Preconditioner, require_second_moment
from divebatch.estimators.step_gradients import StepGradients
from divebatch.estimators.stepwise import Source, Stepwise, require_settings
from divebatch.norms.accumulators import trainable
from divebatch.state_checks import Check, anything, table, whole


class Moments(Stepwise):
    """Compares gradients of successive steps: what they have in common is signal, the rest noise. No layer is touched.

    Bias: the weights move between steps, and a gradient's noise with them, against which the next gradients point. With
    momentum, products of gradients one and two steps apart show by how much, and are extrapolated to none apart
    (`lagged_products.extrapolation`): what is left is of higher order in the learning rate. On ResNet-18 B came out
    0.76 to 1.13 times what `split` said in epochs 5 to 30 of 40, and several times too large in the first; around a
    minimum 0.7 to 1.5 times what it was. Cost: a few passes over the gradients a step, and three sketches of them
    (`gradient_sketch`), at most 1 % of the parameters' memory together; models below some 6 million parameters are
    rather copied three times. No further backward pass, and no layer needs a rule. Under BatchNorm it is right for the
    network as it trains, normalised over its whole batches.

    Without momentum, or with too little, gradients are compared in pairs. That takes one copy, and the bias stays: a
    step at learning rate lr changes the next gradient by -lr * H g, H the Hessian, so to first order ||G||^2 comes out
    too small by lr * E[g'Hg] and tr(Sigma) too large by lr * tr(H Sigma) with pairs and plain SGD; momentum and larger
    windows add to it. At a high rate successive gradients may even point against each other. How large that bias is
    cannot be told, only that it makes B too large. So the interval goes down to zero, and no policy lets a batch grow
    on it: use `split` or `per-sample`. Where ||G||^2 comes out below zero, nothing is said of the noise scale at all.

    It reads gradients as `optimizer.step()` finds them: clipping before the step is measured with them, a GradScaler's
    scale is undone, and where ranks share a batch they are the whole batch's. Batches whose step was skipped after
    their backward pass are in no estimate; one left out before it would count with the next.

    Args:
        window: compares so many gradients, at least 2, as chunks of one large batch; None extrapolates as above where
            the optimizer's momentum allows it, and else compares pairs.
        decay: below 1 for an exponential mean over estimates; 0.95 looks back some twenty.
        preconditioned: whether to measure gradients as an Adam-like optimizer sees them, each divided by what its own
            step divides by.
        every_steps: makes one estimate in so many steps, or in as few as it takes; the steps in between are not looked
            at and cost next to nothing. With 1 there is one a step where it is extrapolated, else one a window.
        sketch: whether gradients are kept as sketches, whose error is part of the interval, or whole; None for sketches
            where one of 2^14 numbers or more fits into 1 % of the parameters' memory.
        sketch_size: numbers of a sketch; None for the largest power of two that fits, and at most 2^20.
    """

    name = "moments"
    stand_in = "per-sample"
    undoes_grad_scale = True
    has_inner_variance = True
    sees_all_ranks = True

    def __init__(
        self,
        *,
        window: int | None = None,
        decay: float = 1.0,
        preconditioned: bool = False,
        every_steps: int = 1,
        sketch: bool | None = None,
        sketch_size: int | None = None,
    ) -> None:
        require_settings(preconditioned=preconditioned, every_steps=every_steps)
        comparing = Comparing(window, sketch, sketch_size)
        source = SuccessiveSteps(comparing, preconditioned=preconditioned, every_steps=every_steps)
        super().__init__(source, decay=decay)


class SuccessiveSteps(Source):
    """The gradients of successive optimizer steps, as chunks of one batch or extrapolated."""

    nothing_seen = "the epoch has ended, but no optimizer step on a batch of the loader was seen in it"
    may_see_nothing = True  # large batches leave an epoch with a step or two
    takes_replays = True  # no pass has to be seen where no step is skipped

    def __init__(self, comparing: Comparing, *, preconditioned: bool, every_steps: int) -> None:
        self._comparing, self._preconditioned, self.every_steps = comparing, preconditioned, every_steps
        # Noise of different steps is independent, so products of gradients have none of it, and their squares have all.
        self.added_noise = "mixed" if preconditioned else "in trace"

    def prepare(self, scene: Scene) -> None:
        scene.require_optimizer(Moments.name)
        if self._preconditioned:
            require_second_moment(scene.require_one_optimizer("preconditioned=True", Moments.name))

    def caveat(self, scene: Scene) -> str:
        if self._comparing.is_extrapolated(scene.require_optimizer(Moments.name)):
            return ""
        return (
            "'moments' can only say how large it is at most where the optimizer has a momentum below 0.4, to which "
            "lr_coupling='adam' may have lowered it, or a window is set: policies that go by its interval will not "
            "grow a batch. Give the optimizer momentum, or the controller estimator='per-sample' (a model without "
            "BatchNorm) or 'split' (batches as two micro_batches)"
        )

    def attach(self, scene: Scene, decay: float) -> PairAverage:
        self._scene, self._optimizer = scene, scene.require_optimizer(Moments.name)
        self._parameters = trainable(scene.model)
        self._preconditioner = Preconditioner(self._optimizer, self._parameters) if self._preconditioned else None
        # The weights move between the compared steps, and that bias can carry ||G||^2 below zero.
        self._average = PairAverage(decay=decay, trusts_negative=False)
        # The samples so far are the same on all ranks, so their signs are, and other ones in each epoch.
        seed = scene.delivery.samples_delivered
        self._use(*self._comparing.start(self._parameters, self._optimizer, seed=seed))
        self._stepped = self._passed = scene.delivery.samples_delivered
        """Samples that had been delivered at the last optimizer step, and at the last backward pass."""
        self._pause = 0
        """Steps to come that are not looked at."""
        self._stop = when_gradients_are_used(scene, Moments.name, self._on_step, reads_gradients=True)
        self._drops = DropWatch(next(iter(self._parameters.values())), self._on_drop, self._on_pass)
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
        step = StepGradients(gradients, scale=to_mean, grad_scale=grad_scale, preconditioner=self._preconditioner)
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

    def state_check(self, scene: Scene) -> Check:
        parameters = trainable(scene.model)
        fields = {"made_with": self._comparing.made_with_check(parameters), "chunks": anything}
        counts = {"since_step": whole(), "pause": whole(at_most=self.every_steps)}

        def check(place: str, state: Any) -> None:
            table({**fields, **counts})(place, state)
            chunks_check(state["made_with"], parameters)(f"{place}.chunks", state["chunks"])

        return check

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made_with = state["made_with"]
        if made_with != self._made_with:  # other signs, or the optimizer's momentum is not loaded yet
            self._use(self._comparing.resume(made_with, self._parameters, self._optimizer), made_with)
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]
        self._pause = state["pause"]
        if all(p.grad is None for p in self._parameters.values()):  # a gradient under way was not saved
            self._stepped = self._scene.delivery.samples_delivered
