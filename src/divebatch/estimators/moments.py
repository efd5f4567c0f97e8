"""An estimate from the batch gradients alone."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from divebatch.checks import require_count
from divebatch.errors import CheckpointError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.chunk_gradients import ChunkWise
from divebatch.estimators.dropped import DropWatch, loss_scale
from divebatch.estimators.estimator import Scene, optimizer_of
from divebatch.estimators.lagged_products import KEPT, Lagged, check_gradients, extrapolation
from divebatch.estimators.stepping import when_gradients_are_used
from divebatch.measurement import Diversity

PAIR = 2


class Moments(ChunkWise):
    """Gradients of successive steps: what they share is signal, where they differ is noise. No layer is touched.

    Bias: the weights move between steps, and a gradient's noise with them, against which the next gradients point. With
    momentum, products of gradients one and two steps apart show by how much, and are extrapolated to none apart
    (`lags.extrapolation`): what is left is of higher order in the learning rate. On ResNet-18 B came out 0.76 to 1.13
    times what `split` said in epochs 5 to 30 of 40, and several times too large in the first; around a minimum 0.7 to
    1.5 times what it was. Cost: three copies of the trainable parameters and a few passes over them a step; no further
    backward pass, and no layer needs a rule. Under BatchNorm it is right for the network as it trains, normalised over
    its whole batches.

    Without momentum, or with too little, gradients are compared in pairs, and so they are with `window=2`; with a
    larger one in as many, as chunks of one large batch. It takes one copy, and the bias stays: a step at learning rate
    lr changes the next gradient by -lr * H g, H the Hessian, so to first order ||G||^2 comes out too small by
    lr * E[g'Hg] and tr(Sigma) too large by lr * tr(H Sigma) with pairs and plain SGD; momentum and larger windows add
    to it. At a high rate successive gradients may even point against each other. So where ||G||^2 comes out below
    zero, nothing is said of the noise scale: its interval has no end on either side.

    It reads gradients as `optimizer.step()` finds them: clipping before the step is measured with them, a GradScaler's
    scale is undone, and where ranks share a batch they are the whole batch's. Batches whose step was skipped after
    their backward pass are in no estimate; one left out before it would count with the next.

    `preconditioned=True` is `split`'s; each gradient is divided by what its own step has, a window by what its first
    step has. `every=q` makes one estimate in q steps, or in as few as it takes; steps in between are not looked at and
    cost next to nothing. By default there is one a step where it is extrapolated, else one a window.
    """

    name = "moments"
    undoes_grad_scale = True
    has_inner_variance = True
    sees_all_ranks = True

    def __init__(
        self, *, window: int | None = None, decay: float = 1.0, preconditioned: bool = False, every: int = 1
    ) -> None:
        super().__init__(decay=decay, preconditioned=preconditioned, every=every)
        if window is not None:
            require_count("window", window, at_least=2)
        self._window = window
        self._pause = 0
        """Steps to come that are not looked at."""
        self._handle: RemovableHandle | None = None
        self._watch: DropWatch | None = None
        self._passed = 0
        """Samples the loader had delivered at the last backward pass."""

    @property
    def replay_token(self) -> object:
        """No pass has to be seen where no step is skipped, so one that was recorded may be replayed."""
        return True

    def _prepare(self, scene: Scene) -> None:
        self._require_optimizer(scene, "moments")

    def _attach(self, scene: Scene) -> None:
        self._chunks, self._stepped, self._pause = self._new_chunks(scene), scene.samples_delivered(), 0
        self._handle = when_gradients_are_used(optimizer_of(scene, "moments"), self._on_step)
        self._watch = DropWatch(next(iter(self._chunks.parameters.values())), self._drop, self._on_pass)

    def _detach(self) -> None:
        if self._handle is not None and self._watch is not None:
            self._handle.remove()
            self._watch.close()
        self._chunks, self._handle, self._watch = None, None, None

    def _on_pass(self) -> None:
        self._passed = self._bound().samples_delivered()

    def _drop(self) -> None:
        """What was delivered up to the last pass is in no gradient any more."""
        self._stepped = max(self._stepped, self._passed)

    def _on_step(self) -> None:
        chunks, scene, watch = self._chunks, self._bound(), self._watch
        assert chunks is not None
        assert watch is not None
        watch.stepped()
        size = scene.samples_delivered() - self._stepped
        if size and self._pause:
            self._stepped, self._pause = self._stepped + size, self._pause - 1
            self._average.num_samples = self._average.num_samples + size
            return
        gradients = {name: p.grad for name, p in chunks.parameters.items() if p.grad is not None}
        if size == 0 or not gradients:
            return
        self._stepped += size
        if math.isfinite(scale := loss_scale(optimizer_of(scene, "moments"))):
            self._add(gradients, size, scale)

    def _add(self, gradients: dict[str, Tensor], size: int, scale: float) -> None:
        chunks, scene = self._chunks, self._bound()
        # A mean over ranks of sums over their samples is the whole sum over the number of ranks.
        to_mean = 1.0 if scene.loss_reduction == "mean" else scene.ranks.size / size
        chunks.add(gradients, size, scale=to_mean / scale)
        self._average.num_samples = self._average.num_samples + size
        needed = KEPT if (is_lagged := isinstance(chunks, Lagged)) else self._window or PAIR
        if chunks.num_chunks < needed:
            return
        self._add_row(chunks.row())
        self._pause = max(0, self._every - needed)
        if not is_lagged or self._every > 1:
            chunks.forget()

    def _seen(self) -> Diversity:
        """Without ends of the interval where ||G||^2 comes out below zero: chance or the bias, and no evidence."""
        seen = super()._seen()
        if seen.spread is None or not seen.sq_norm < 0:
            return seen
        return replace(seen, spread=replace(seen.spread, sq_norm_variance=math.inf))

    def _new_average(self) -> PairAverage:
        """Where there is an estimate a step, it shares its gradients with the two before."""
        is_overlapping = isinstance(self._chunks, Lagged) and self._every == 1
        return PairAverage(decay=self._decay, reach=KEPT - 1 if is_overlapping else 0)

    def _new_chunks(self, scene: Scene) -> Any:
        is_lagged = self._window is None and extrapolation(optimizer_of(scene, "moments")) > 0
        return self._new_lagged(scene) if is_lagged else super()._new_chunks(scene)

    def _new_lagged(self, scene: Scene) -> Lagged:
        return Lagged(scene.model, optimizer_of(scene, "moments"), preconditioned=self._preconditioned)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "pause": self._pause}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        if not _is_lagged(state):
            super()._check_own_state(state)
            return
        if self._window is not None:
            raise CheckpointError(
                f"the checkpoint's estimate by moments is extrapolated, and here it is made from {self._window} steps "
                f"at a time: go on with Moments(), without a window"
            )
        check_gradients(state["chunks"], dict(self._bound().model.named_parameters()))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        scene, is_lagged = self._bound(), _is_lagged(state)
        if is_lagged != isinstance(self._chunks, Lagged):  # the optimizer's momentum may not be loaded yet
            self._chunks = self._new_lagged(scene) if is_lagged else super()._new_chunks(scene)
            self._average = self._new_average()
        super()._load_own_state(state)
        self._pause = state.get("pause", 0)  # not in states of before
        if all(p.grad is None for p in self._chunks.parameters.values()):  # a gradient under way was not saved
            self._stepped = self._bound().samples_delivered()

    def _when_empty(self) -> Diversity:
        """Large batches leave an epoch with a step or two: that is no error, and no evidence either."""
        if not self._average.num_samples:
            raise UsageError("the epoch has ended, but no optimizer step on a batch of the loader was seen in it")
        return self._average.unknown()


def _is_lagged(state: dict[str, Any]) -> bool:
    return "gradients" in state["chunks"]
