"""An estimate from the batch gradients alone."""

from typing import Any

from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.chunks import ChunkWise
from divebatch.estimators.estimator import Scene, optimizer_of, require_whole
from divebatch.measurement import Diversity


class Moments(ChunkWise):
    """Gradients of `window` successive steps, taken as chunks of one large batch: nothing is attached to the model.

    Bias: the weights move within a window. A step at learning rate lr changes the next gradient by -lr * H g, H the
    Hessian, so to first order ||G||^2 comes out too small by lr * E[g'Hg] and tr(Sigma) too large by lr * tr(H Sigma),
    with the smallest window, 2, and plain SGD; momentum and larger windows add to it. It vanishes with the learning
    rate. Cost: one copy of the trainable parameters and a few passes over it a step; no further backward pass, and no
    layer needs a rule. Under BatchNorm it is right for the network as it trains, normalised over its whole batches.

    It reads gradients as `optimizer.step()` finds them: clipping before the step is measured with them, a GradScaler
    has undone its scale by then, and where ranks share a batch they are the whole batch's. Two batches scatter as two
    chunks do in `split`, with half as many estimates.

    `preconditioned=True` is `split`'s; a window is divided by what its first step was.
    """

    sees_all_ranks = True
    replay_token = True
    """Nothing is attached to the backward pass, so one that was recorded without may be replayed."""

    def __init__(self, *, window: int = 2, decay: float = 1.0, preconditioned: bool = False) -> None:
        super().__init__(decay=decay, preconditioned=preconditioned)
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise ArgumentError(f"window must be an integer of at least 2, got window={window!r}")
        self._num_steps = window
        self._handle: RemovableHandle | None = None

    def _prepare(self, scene: Scene) -> None:
        self._require_optimizer(scene, "moments")
        require_whole(scene, "moments")

    def _attach(self, scene: Scene) -> None:
        self._chunks, self._stepped = self._new_chunks(scene), scene.samples_delivered()
        self._handle = optimizer_of(scene, "moments").register_step_pre_hook(self._on_step)

    def _detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._chunks, self._handle = None, None

    def _on_step(self, *_: Any) -> None:
        chunks, scene = self._chunks, self._bound()
        assert chunks is not None
        size = scene.samples_delivered() - self._stepped
        gradients = {name: p.grad for name, p in chunks.parameters.items() if p.grad is not None}
        if size == 0 or not gradients:
            return
        self._stepped += size
        # A mean over ranks of sums over their samples is the whole sum over the number of ranks.
        chunks.add(gradients, size, scale=1.0 if scene.loss_reduction == "mean" else scene.ranks.size / size)
        self._average.num_samples = self._average.num_samples + size
        if chunks.num_chunks == self._num_steps:
            self._average.add(chunks.pair(), chunks.num_samples)
            chunks.forget()

    def _when_empty(self) -> Diversity:
        """Large batches leave an epoch with a step or two: that is no error, and no evidence either."""
        if not self._average.num_samples:
            raise UsageError("the epoch has ended, but no optimizer step on a batch of the loader was seen in it")
        return self._average.unknown()
