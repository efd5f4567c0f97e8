"""The base class of estimators, and what they are shown of a training loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Diversity
from divebatch.norms.loss_scale import LossReduction, LossWeight
from divebatch.ranks import Ranks, RankShard

NoiseSeen = Literal["nowhere", "in trace", "mixed"]


class Delivery(Protocol):
    """What an estimator asks of whoever delivers the samples: an `AdaptiveLoader`."""

    @property
    def samples_delivered(self) -> int:
        """Samples that were handed to the loop so far, those of all ranks."""
        ...

    @property
    def local_samples_delivered(self) -> int:
        """Samples that came to this rank so far."""
        ...

    @property
    def rank_shard(self) -> RankShard:
        """This rank's samples of the batch delivered last."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        ...

    def full_pass(self) -> Iterable[Any]:
        """Return every sample once, as batches, without moving the training's own position."""
        ...


@dataclass(frozen=True, slots=True)
class Scene:
    """What an estimator may look at.

    Args:
        model: the model that is trained, without DistributedDataParallel around it.
        delivery: who delivers the samples.
        optimizer: the optimizer that steps; estimators that look at single steps need it. Of several, the one that
            holds most of the model's parameters.
        other_optimizers: those that hold the rest of them.
        loss_reduction: how the loss is reduced over the samples of a backward pass, "mean" or "sum".
    """

    model: nn.Module
    delivery: Delivery
    optimizer: Optimizer | None = None
    _: KW_ONLY
    other_optimizers: tuple[Optimizer, ...] = ()
    loss_reduction: LossReduction = "mean"

    def require_optimizer(self, name: str) -> Optimizer:
        """The optimizer, for an estimator that must know when weights change."""
        if self.optimizer is None:
            raise ArgumentError(f"{name} must know when the optimizer steps: Scene(..., optimizer=...) has none")
        return self.optimizer

    def require_one_optimizer(self, setting: str, name: str) -> Optimizer:
        """The optimizer, for a setting that reads what it keeps of each parameter."""
        optimizer = self.require_optimizer(name)
        if self.other_optimizers:
            kinds = ", ".join(type(each).__name__ for each in (optimizer, *self.other_optimizers))
            raise ArgumentError(f"{setting} is for one optimizer that holds all of the model's parameters, got {kinds}")
        return optimizer

    def rank_weight(self) -> float:
        """The factor for this rank's loss of the batch under way; 0 for a dummy's."""
        return self.delivery.rank_shard.weight_for(self.loss_reduction)

    def samples_here(self) -> int:
        """Samples that came to this rank so far."""
        return self.delivery.local_samples_delivered

    def rank_shard(self) -> RankShard:
        """This rank's samples of the batch under way."""
        return self.delivery.rank_shard


class Estimator(ABC):
    """Turns what an epoch's backward passes show into a `Diversity`.

    The controller calls `bind` once, then for each epoch that is to be measured `start` and `finish`; where the epoch
    begins anew, `close` and `start` again. Between `finish` and `start` nothing may be attached to the model. What an
    estimator can and cannot do stands in its class attributes. A new estimator is one file in this folder and one row
    in `catalog.py`.
    """

    name: ClassVar[str] = ""
    """What experiment files and `Controller(estimator=...)` call it."""
    at_fixed_weights: ClassVar[bool] = True
    """Whether n * diversity - 1 is the gradient noise scale; not where gradients of many steps are summed up."""
    measures_norms: ClassVar[bool] = False
    """Whether every layer needs a norm rule; such an estimator takes `NormMeter`'s settings."""
    needs_whole_gradients: ClassVar[bool] = True
    """Whether it needs whole gradients at once, which FSDP2 has nowhere."""
    needs_loss_fn: ClassVar[bool] = False
    """Whether it runs the model by itself and must be made with `loss_fn`."""
    undoes_grad_scale: ClassVar[bool] = False
    """Whether it is right under a GradScaler without being told of it."""
    stand_in: ClassVar[str] = ""
    """The estimator to take where policies would not act on this one (`caveat`) and that one `can_measure`; or none."""
    has_window: ClassVar[bool] = True
    """Whether `window` may be asked within an epoch."""
    has_inner_variance: ClassVar[bool] = False
    """Whether the `Diversity` comes with its `inner_variance`."""
    sees_all_ranks: ClassVar[bool] = False
    """Whether each rank sees what all saw together, so that estimates are not averaged over ranks."""

    @classmethod
    def can_measure(cls, scene: Scene, batch_size: int) -> bool:
        """Whether it is right for this model and batches of so many samples, as far as that shows before training."""
        return True

    @property
    def added_noise(self) -> NoiseSeen:
        """Where noise shows that is added to gradients on purpose, after their backward pass and before the step.

        "nowhere" for an estimator that looks at backward passes, "in trace" for one that looks at steps and finds it in
        tr(Sigma) alone; "mixed" where it cannot be told from what the data shows.
        """
        return "nowhere"

    @property
    def min_micro_batches(self) -> int:
        """How many backward passes the next batch must be cut into at least."""
        return 1

    @property
    def min_batch_size(self) -> int:
        """The fewest samples, over all ranks, that a batch must have for it to show anything; known after `bind`."""
        return 1

    @property
    def min_steps_between_decisions(self) -> int:
        """How many steps a decision must be apart from the last one, for it to have an interval."""
        return 1

    @property
    def replay_token(self) -> object:
        """A recorded backward pass may be replayed while this stays the same; None: every pass must run in Python."""
        return None

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:  # noqa: B027 (most do nothing)
        """Take in a replayed backward pass, which no hook sees.

        Args:
            gradients: those of the pass's own mean loss, by the parameters' names.
            weight: the factor of that loss in the batch's, with the number of its samples.
        """

    def caveat(self, scene: Scene) -> str:
        """Say why policies will not act on what this measures there, and the way out; empty where they will."""
        return ""

    @abstractmethod
    def bind(self, scene: Scene) -> None:
        """Look the model over; raise here if it cannot be measured."""

    def start(self) -> None:  # noqa: B027 (some only look afterwards)
        """Begin a measured epoch."""

    def window(self) -> Diversity:
        """Return what was seen since the last call, or since `start`, and go on measuring."""
        raise UsageError(f"{type(self).__name__} sums over whole epochs and cannot be asked within one")

    @abstractmethod
    def finish(self) -> Diversity:
        """Return what the epoch showed, and detach."""

    def close(self) -> None:  # noqa: B027 (some attach nothing)
        """Detach, whatever the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of an epoch under way; an empty dict between epochs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (some have no state)
        """Continue an epoch; called after `start`."""
