"""An unbiased estimate from the chunks that a batch is cut into."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.chunk_gradients import Chunks
from divebatch.estimators.estimator import Scene
from divebatch.estimators.optimizer_events import PassWatch, when_gradients_are_used
from divebatch.estimators.second_moment import require_second_moment
from divebatch.estimators.stepwise import Source, Stepwise, require_settings
from divebatch.norms.accumulators import trainable
from divebatch.norms.loss_scale import LossWeight
from divebatch.ranks import Ranks

HOW_TO_CUT = (
    "cut each batch into two or more: for (x, y), weight in divebatch.micro_batches(batch, size): "
    "(loss_fn(model(x), y) * weight).backward()"
)
NOTHING_CUT = f"the epoch has ended, and no batch in it went through in two or more backward passes; {HOW_TO_CUT}"

OnChunk = Callable[[Mapping[str, Tensor], int, float, float], None]
"""Is told gradients, the chunk's samples, the weight of its loss, and what turns the gradients into its mean one."""


class Split(Stepwise):
    """Compares chunks of one batch at the same weights: what they have in common is signal, the rest is noise.

    It sees the backward passes between two optimizer steps, so gradient accumulation is all it needs: over several
    batches of the loader, or over parts of one from `divebatch.micro_batches`. The loss must be a mean over samples.

    Bias: none, with chunks of any sizes. Under BatchNorm it is right too, for the network as it trains: normalised
    over one chunk at a time. Cost: one copy of the trainable parameters (the trainer's replays take one more, or
    two); more backward passes only where batches would not have been cut anyway. Two chunks scatter more than
    `per-sample`; the interval says how much. Works with every model, since no layer needs a rule. A GradScaler that
    skips a step leaves out its batch and the next, whose passes are compared with it.

    Args:
        decay: below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        preconditioned: whether to measure gradients as an Adam-like optimizer sees them, each coordinate over the root
            of its running second moment. Exact: all chunks of a batch are divided by the same.
        every_steps: looks at one batch in so many, the first of them. The others may go through as a whole, and cost
            little; `control.plan().min_micro_batches` says for each batch whether it is to be cut.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses, where there is one.
    """

    name = "split"
    has_inner_variance = True

    def __init__(
        self, *, decay: float = 1.0, preconditioned: bool = False, every_steps: int = 1, grad_scaler: Any = None
    ) -> None:
        require_settings(preconditioned=preconditioned, every_steps=every_steps)
        source = BatchChunks(preconditioned=preconditioned, every_steps=every_steps, grad_scaler=grad_scaler)
        super().__init__(source, decay=decay)


class BatchChunks(Source):
    """The backward passes between two optimizer steps, as chunks of one batch."""

    nothing_seen = NOTHING_CUT
    takes_replays = True

    def __init__(self, *, preconditioned: bool, every_steps: int, grad_scaler: Any = None) -> None:
        self._preconditioned, self.every_steps, self._grad_scaler = preconditioned, every_steps, grad_scaler
        self._num_batches = 0

    @property
    def min_micro_batches(self) -> int:
        return 2 if self._is_looking() else 1

    def min_batch_size(self, ranks: Ranks) -> int:
        """One rank must have two samples, which it compares."""
        return ranks.size + 1

    def prepare(self, scene: Scene) -> None:
        require_mean(scene, Split.name)
        scene.require_optimizer(Split.name)
        if self._preconditioned:
            require_second_moment(scene.require_one_optimizer("preconditioned=True", Split.name))

    def attach(self, scene: Scene, decay: float) -> PairAverage:
        self._num_batches = 0
        self._average = PairAverage(decay=decay)
        parameters, optimizer = trainable(scene.model), scene.optimizer if self._preconditioned else None
        self._chunks = Chunks(parameters, optimizer=optimizer)
        self._batches = BatchWatch(
            scene,
            parameters,
            lambda gradients, size, _, scale: self._chunks.add(gradients, size, scale=scale),
            lambda num_delivered, _: self._end_of_batch(num_delivered),
            self._is_looking,
            self._grad_scaler,
        )
        return self._average

    def detach(self) -> None:
        self._batches.close()
        del self._chunks

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        if self._is_looking():
            self._batches.take_replay(gradients, weight)

    def _is_looking(self) -> bool:
        return self._num_batches % self.every_steps == 0

    def _end_of_batch(self, num_delivered: int) -> None:
        is_whole = self._chunks.num_chunks < 2
        if not self._is_looking():
            self._average.num_samples = self._average.num_samples + num_delivered
            self._num_batches += 1
        else:
            self._num_batches += not is_whole  # else the next one has to show what this one did not
            self._average.num_samples = self._average.num_samples + self._chunks.num_samples
            if not is_whole:
                self._average.add_row(self._chunks.row())
        if self._chunks.num_chunks:
            self._chunks.forget()

    def state_dict(self) -> dict[str, Any]:
        chunks = self._chunks.state_dict()
        return {**self._batches.state_dict(), "chunks": chunks, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)
        self._chunks.load_state_dict(state["chunks"])
        self._num_batches = state["num_batches"]


class BatchWatch:
    """Watches the backward passes between two optimizer steps: one chunk of samples each.

    Args:
        scene: where samples are delivered, and steps are made.
        parameters: those whose gradients make up a chunk's, by name.
        on_chunk: is told of each backward pass.
        on_step: is told, when an optimizer is about to step, how many samples were delivered since it last did, and
            which optimizer it is.
        is_looking: says whether the batch under way is looked at.
        grad_scaler: what multiplies the losses; None where nothing does.
        reads_gradients: whether `on_step` takes the gradients as they are then.
    """

    def __init__(
        self,
        scene: Scene,
        parameters: Mapping[str, nn.Parameter],
        on_chunk: OnChunk,
        on_step: Callable[[int, Optimizer], None],
        is_looking: Callable[[], bool],
        grad_scaler: Any,
        *,
        reads_gradients: bool = False,
    ) -> None:
        self._scene, self._parameters, self._grad_scaler = scene, parameters, grad_scaler
        self._on_chunk, self._on_step = on_chunk, on_step
        self._stepped = self._delivered()
        """Samples that had been delivered at the last optimizer step."""
        self._num_samples: float = 0
        """Samples of the chunks since then."""
        self._passes = PassWatch(parameters, self._end_of_pass, is_wanted=is_looking)
        self._stop = when_gradients_are_used(scene, "split", self._end_of_batch, reads_gradients=reads_gradients)

    def close(self) -> None:
        """Take the hooks off."""
        self._passes.close()
        self._stop()

    def take_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        """A recorded pass was replayed: the gradients of its own mean loss, to which no weight was applied."""
        own = {name: gradients[name] for name in self._parameters if name in gradients}
        self._take(own, weight, applied=1.0)

    def _end_of_pass(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        self._take(gradients, weight, applied=float(weight))

    def _take(self, gradients: Mapping[str, Tensor], weight: LossWeight, *, applied: float) -> None:
        rank_weight = self._scene.rank_weight()
        if not rank_weight or not weight:  # of a dummy
            return
        size = self._scene.delivery.rank_shard.mine if weight.num_samples is None else weight.num_samples
        self._num_samples += size
        self._on_chunk(gradients, size, float(weight), 1 / (applied * rank_weight * self._loss_scale()))

    def _loss_scale(self) -> float:
        """What the GradScaler has multiplied the loss of this pass with; 1 where none was used so far."""
        is_used = getattr(self._grad_scaler, "_scale", None) is not None
        return float(self._grad_scaler.get_scale()) if is_used else 1.0

    def _end_of_batch(self, optimizer: Optimizer) -> None:
        num_delivered, num_seen = self._since_step(), round(self._num_samples)
        if num_seen > num_delivered:
            raise UsageError(
                f"the backward passes since the last optimizer step held {num_seen} samples by the loader's count, and "
                f"it delivered {num_delivered}: {HOW_TO_CUT}"
            )
        self._on_step(num_delivered, optimizer)
        self._num_samples = 0
        self._stepped += num_delivered

    def _delivered(self) -> int:
        """Samples that came to this rank so far."""
        return self._scene.delivery.local_samples_delivered

    def _since_step(self) -> int:
        return self._delivered() - self._stepped

    def state_dict(self) -> dict[str, Any]:
        """What was delivered and seen since the last step."""
        # Half a batch's chunks are of one rank alone, and a state must be that of all ranks.
        if self._num_samples and not self._scene.delivery.ranks.is_alone:
            raise UsageError("ranks that share a batch save their state after an optimizer step, not within one")
        return {"since_step": self._since_step(), "num_samples": round(self._num_samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on within a batch."""
        self._stepped -= state["since_step"]
        self._num_samples = state["num_samples"]


def require_mean(scene: Scene, name: str) -> None:
    """Raise for a loss that is no mean over samples."""
    if scene.loss_reduction != "mean":
        raise ArgumentError(
            f"{name} needs a loss that is a mean over samples, got loss_reduction={scene.loss_reduction!r}; "
            f"'moments' and 'per-sample' take sums"
        )
