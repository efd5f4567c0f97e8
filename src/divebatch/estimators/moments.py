"""An estimate from the batch gradients alone."""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.errors import CheckpointError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.chunk_gradients import Chunks, check_sums, require_second_moment
from divebatch.estimators.estimator import Scene
from divebatch.estimators.lagged_products import KEPT, Lagged, LaggedRow, check_gradients, extrapolation
from divebatch.estimators.optimizer_events import DropWatch, scale_of_gradients, when_gradients_are_used
from divebatch.estimators.stepwise import Source, Stepwise, require_settings
from divebatch.norms.accumulators import trainable

PAIR = 2


class Moments(Stepwise):
    """Compares gradients of successive steps: what they have in common is signal, the rest noise. No layer is touched.

    Bias: the weights move between steps, and a gradient's noise with them, against which the next gradients point. With
    momentum, products of gradients one and two steps apart show by how much, and are extrapolated to none apart
    (`lagged_products.extrapolation`): what is left is of higher order in the learning rate. On ResNet-18 B came out
    0.76 to 1.13 times what `split` said in epochs 5 to 30 of 40, and several times too large in the first; around a
    minimum 0.7 to 1.5 times what it was. Cost: three copies of the trainable parameters and a few passes over them a
    step; no further backward pass, and no layer needs a rule. Under BatchNorm it is right for the network as it trains,
    normalised over its whole batches.

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
            step has, those of a window by what its first step has.
        every_steps: makes one estimate in so many steps, or in as few as it takes; the steps in between are not looked
            at and cost next to nothing. With 1 there is one a step where it is extrapolated, else one a window.
    """

    name = "moments"
    undoes_grad_scale = True
    has_inner_variance = True
    sees_all_ranks = True

    def __init__(
        self, *, window: int | None = None, decay: float = 1.0, preconditioned: bool = False, every_steps: int = 1
    ) -> None:
        if window is not None:
            require_count("window", window, at_least=2)
        require_settings(preconditioned=preconditioned, every_steps=every_steps)
        source = SuccessiveSteps(window=window, preconditioned=preconditioned, every_steps=every_steps)
        super().__init__(source, decay=decay)


class SuccessiveSteps(Source):
    """The gradients of successive optimizer steps, as chunks of one batch or extrapolated."""

    nothing_seen = "the epoch has ended, but no optimizer step on a batch of the loader was seen in it"
    may_see_nothing = True  # large batches leave an epoch with a step or two
    takes_replays = True  # no pass has to be seen where no step is skipped

    def __init__(self, *, window: int | None, preconditioned: bool, every_steps: int) -> None:
        self._window, self._preconditioned, self.every_steps = window, preconditioned, every_steps
        # Noise of different steps is independent, so products of gradients have none of it, and their squares have all.
        self.added_noise = "mixed" if preconditioned else "in trace"

    def prepare(self, scene: Scene) -> None:
        scene.require_optimizer(Moments.name)
        if self._preconditioned:
            require_second_moment(scene.require_one_optimizer("preconditioned=True", Moments.name))

    def caveat(self, scene: Scene) -> str:
        if self._is_extrapolated(scene.require_optimizer(Moments.name)):
            return ""
        return (
            "'moments' can only say how large it is at most where the optimizer has a momentum below 0.4, to which "
            "lr_coupling='adam' may have lowered it, or a window is set: policies that go by its interval will not "
            "grow a batch. Give the optimizer momentum, or the controller estimator='per-sample' (a model without "
            "BatchNorm) or 'split' (batches as two micro_batches)"
        )

    def _is_extrapolated(self, optimizer: Optimizer) -> bool:
        return self._window is None and extrapolation(optimizer) > 0

    def attach(self, scene: Scene, decay: float) -> PairAverage:
        self._scene, self._optimizer = scene, scene.require_optimizer(Moments.name)
        # The weights move between the compared steps, and that bias can carry ||G||^2 below zero.
        self._average = PairAverage(decay=decay, trusts_negative=False)
        self._use(lagged=self._is_extrapolated(self._optimizer))
        self._stepped = self._passed = scene.delivery.samples_delivered
        """Samples that had been delivered at the last optimizer step, and at the last backward pass."""
        self._pause = 0
        """Steps to come that are not looked at."""
        self._stop = when_gradients_are_used(scene, Moments.name, self._on_step, reads_gradients=True)
        self._drops = DropWatch(next(iter(self._chunks.parameters.values())), self._on_drop, self._on_pass)
        return self._average

    def detach(self) -> None:
        self._stop()
        self._drops.close()
        del self._chunks

    def _use(self, *, lagged: bool) -> None:
        self._chunks: Lagged | Chunks
        self._is_lagged, model = lagged, self._scene.model
        if lagged:
            self._chunks = Lagged(model, self._optimizer, preconditioned=self._preconditioned)
        else:
            self._chunks = Chunks(model, optimizer=self._optimizer if self._preconditioned else None)
        # Where there is an estimate a step, it has gradients in common with the two before.
        self._average.reach = KEPT - 1 if lagged and self.every_steps == 1 else 0
        self._average.bounds_below = lagged

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
        gradients = {name: p.grad for name, p in self._chunks.parameters.items() if p.grad is not None}
        if size == 0 or not gradients:
            return
        self._stepped += size
        if math.isfinite(scale := scale_of_gradients(optimizer)):
            self._add(gradients, size, scale)
        else:  # a GradScaler's overflow: the optimizer will skip this step, so it is in no estimate
            self._average.skipped_samples = self._average.skipped_samples + size

    def _add(self, gradients: dict[str, Tensor], size: int, scale: float) -> None:
        # A mean over ranks of sums over their samples is the whole sum over the number of ranks.
        to_mean = 1.0 if self._scene.loss_reduction == "mean" else self._scene.delivery.ranks.size / size
        self._chunks.add(gradients, size, scale=to_mean / scale)
        self._average.num_samples = self._average.num_samples + size
        needed = KEPT if self._is_lagged else self._window or PAIR
        if self._chunks.num_chunks < needed:
            return
        row = self._chunks.row()
        # Momentum may have fallen since: OneCycleLR moves it, and so does lr_coupling="adam" with the batch size.
        if isinstance(row, LaggedRow) and row.factor == 0:
            self._average.bounds_below = False
        self._average.add_row(row)
        self._pause = max(0, self.every_steps - needed)
        if not self._is_lagged or self.every_steps > 1:
            self._chunks.forget()

    def state_dict(self) -> dict[str, Any]:
        return {
            "chunks": self._chunks.state_dict(),
            "is_lagged": self._is_lagged,
            "since_step": self._scene.delivery.samples_delivered - self._stepped,
            "pause": self._pause,
        }

    def check_state(self, scene: Scene, state: dict[str, Any]) -> None:
        chunks, is_lagged = state["source"]["chunks"], state["source"]["is_lagged"]
        if not is_lagged:
            check_sums(chunks, trainable(scene.model))
            return
        if self._window is not None:
            raise CheckpointError(
                f"the checkpoint's estimate by moments is extrapolated, and here it is made from {self._window} steps "
                f"at a time: go on with Moments(), without a window"
            )
        check_gradients(chunks, trainable(scene.model))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["is_lagged"] != self._is_lagged:  # the optimizer's momentum may not be loaded yet
            self._use(lagged=state["is_lagged"])
        self._chunks.load_state_dict(state["chunks"])
        self._stepped -= state["since_step"]
        self._pause = state["pause"]
        if all(p.grad is None for p in self._chunks.parameters.values()):  # a gradient under way was not saved
            self._stepped = self._scene.delivery.samples_delivered
