"""An unbiased estimate from the chunks that a batch is cut into."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.chunk_gradients import ChunkWise
from divebatch.estimators.estimator import Scene, optimizer_of
from divebatch.estimators.recorded import is_recorded
from divebatch.estimators.stepping import when_gradients_are_used
from divebatch.measurement import Diversity
from divebatch.norms.loss_scale import LossWeight, weight_of_pass

HOW_TO_CUT = (
    "cut each batch into two or more: for (x, y), weight in divebatch.micro_batches(batch, size): "
    "(loss_fn(model(x), y) * weight).backward()"
)


class Split(ChunkWise):
    """Chunks of one batch at the same weights: what they share is signal, where they differ is noise.

    It sees the backward passes between two optimizer steps, so gradient accumulation is all it needs: over several
    batches of the loader, or over parts of one from `divebatch.micro_batches`. The loss must be a mean over samples.

    Bias: none, with chunks of any sizes. Under BatchNorm it is right too, for the network as it trains: normalised
    over one chunk at a time. Cost: one copy of the trainable parameters (the trainer's replays take one more, or
    two); more backward passes only where batches would not have been cut anyway. Two chunks scatter more than
    `per-sample`; the interval says how much. Works with every model, since no layer needs a rule. Under a GradScaler
    use `moments`.

    `preconditioned=True` measures gradients as an Adam-like optimizer sees them, each coordinate over the root of its
    running second moment. Exact: all chunks of a batch are divided by the same.

    `every=q` looks at one batch in q, the first of them: the others may go through as a whole, and cost little.
    `control.min_micro_batches` says for each batch whether it is to be cut.
    """

    name = "split"
    has_inner_variance = True

    def __init__(self, *, decay: float = 1.0, preconditioned: bool = False, every: int = 1) -> None:
        super().__init__(decay=decay, preconditioned=preconditioned, every=every)
        self._num_batches = 0
        self._handles: list[RemovableHandle] = []
        self._received: dict[str, Tensor] = {}
        self._task, self._counts = -1, False

    @property
    def replay_token(self) -> object:
        """A pass that was recorded may be replayed, where `see_replay` is told."""
        return True

    @property
    def min_micro_batches(self) -> int:
        """Backward passes that the batch under way must go through in at least."""
        return 2 if self._looks else 1

    @property
    def _looks(self) -> bool:
        return self._num_batches % self._every == 0

    def _prepare(self, scene: Scene) -> None:
        if scene.loss_reduction != "mean":
            raise ArgumentError(
                f"{self.name} needs a loss that is a mean over samples, got loss_reduction={scene.loss_reduction!r}; "
                f"'moments' and 'per-sample' take sums"
            )
        self._require_optimizer(scene, self.name)

    def _attach(self, scene: Scene) -> None:
        self._chunks = self._new_chunks(scene)
        self._delivered = self._stepped = scene.delivered_here()
        self._batch = self._num_batches = 0
        self._handles = [when_gradients_are_used(optimizer_of(scene, self.name), self._end_of_batch)]
        for name, parameter in self._chunks.parameters.items():
            self._handles.append(parameter.register_hook(partial(self._receive, name)))
            # Fires for backward() and not for autograd.grad(): a look at gradients in between is no training.
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._chunks, self._received = None, {}

    # One backward pass

    def _receive(self, name: str, gradient: Tensor) -> None:
        if not self._looks or is_recorded(gradient):
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what an earlier pass left, which died half-way, is dropped
            self._task, self._received, self._counts = task, {}, False
        self._received[name] = gradient.detach()

    def _accumulated(self, parameter: Tensor) -> None:
        if self._looks and not (self._counts or is_recorded(parameter)):
            self._counts = True
            Variable._execution_engine.queue_callback(self._end_of_pass)

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        """A recorded pass was replayed, which no hook sees: the gradients of its own mean loss."""
        if self._chunks is not None and self._looks:
            self._received = {name: gradients[name] for name in self._chunks.parameters if name in gradients}
            self._take(weight, 1.0)

    def _end_of_pass(self) -> None:
        weight = weight_of_pass(self._task)
        weight = LossWeight(1.0) if weight is None else weight
        self._take(weight, float(weight))

    def _take(self, weight: LossWeight, factor: float) -> None:
        """What was received is the mean gradient of one chunk of this weight times `factor`."""
        of_rank = self._bound().loss_weight()
        if self._chunks is not None and of_rank and weight:
            size = self._batch_length() if weight.num_samples is None else weight.num_samples
            self._add_chunk(size, float(weight), scale=1 / (factor * of_rank))
        self._received = {}

    def _add_chunk(self, num_samples: int, share: float, *, scale: float) -> None:
        assert self._chunks is not None
        self._chunks.add(self._received, num_samples, scale=scale)

    def _batch_length(self) -> int:
        if (share := self._bound().share) is not None:  # right also where the loop left batches out
            return share().mine
        delivered = self._bound().delivered_here()
        if delivered != self._delivered:
            self._batch, self._delivered = delivered - self._delivered, delivered
        return self._batch

    # One batch

    def _end_of_batch(self) -> None:
        chunks, delivered = self._chunks, self._bound().delivered_here()
        assert chunks is not None
        if chunks.num_samples > delivered - self._stepped:
            raise UsageError(
                f"the backward passes since the last optimizer step held {chunks.num_samples} samples by the loader's "
                f"count, and it delivered {delivered - self._stepped}: {HOW_TO_CUT}"
            )
        if not self._looks:
            self._average.num_samples = self._average.num_samples + delivered - self._stepped
            self._delivered = delivered
            self._num_batches += 1
        else:
            self._num_batches += chunks.num_chunks > 1  # else the next one has to show what this one did not
            self._count(chunks)
        if chunks.num_chunks:
            chunks.forget()
        self._stepped = delivered

    def _count(self, chunks: Any) -> None:
        if chunks.num_chunks > 1:
            self._add_row(chunks.row())
        self._average.num_samples = self._average.num_samples + chunks.num_samples

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "num_batches": self._num_batches}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._num_batches = state.get("num_batches", 0)  # not in states of before

    def _when_empty(self) -> Diversity:
        raise UsageError(
            f"the epoch has ended, and no batch in it went through in two or more backward passes; {HOW_TO_CUT}"
        )
