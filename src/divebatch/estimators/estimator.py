"""The base class of estimators, and the parts of a training loop that they use."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Diversity, StepEvent
from divebatch.norms import DiversityMeter
from divebatch.norms.loss_scale import LossReduction, LossWeight


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The model, loader and optimizers that an estimator may use.

    Args:
        model: The model to train, without DistributedDataParallel around it.
        loader: The loader that delivers the samples.
        optimizer: The optimizer that steps; of several, the one with most of the model's parameters.
        other_optimizers: The other optimizers of the model's parameters.
        loss_reduction: How the loss is reduced over the samples of a backward pass, "mean" or "sum".
    """

    model: nn.Module
    loader: AdaptiveLoader
    optimizer: Optimizer | None = None
    _: KW_ONLY
    other_optimizers: tuple[Optimizer, ...] = ()
    loss_reduction: LossReduction = "mean"

    def require_optimizer(self, name: str) -> Optimizer:
        """Return the optimizer, for an estimator that observes its steps; raise if there is none."""
        if self.optimizer is None:
            raise ArgumentError(f"{name} must know when the optimizer steps: the TrainingContext has no optimizer")
        return self.optimizer

    def require_one_optimizer(self, setting: str, name: str) -> Optimizer:
        """Return the only optimizer, for a setting that reads its state; raise if there are several."""
        optimizer = self.require_optimizer(name)
        if self.other_optimizers:
            kinds = ", ".join(type(each).__name__ for each in (optimizer, *self.other_optimizers))
            raise ArgumentError(f"{setting} is for one optimizer that holds all of the model's parameters, got {kinds}")
        return optimizer


def meter_of(context: TrainingContext, **settings: Any) -> DiversityMeter:
    """Return a meter of the loop's backward passes that leaves out those whose gradients are not finite."""
    loader = context.loader
    return DiversityMeter(
        context.model,
        rank_shard=lambda: loader.rank_shard,
        delivered=lambda: loader.local_samples_delivered,
        loss_reduction=context.loss_reduction,
        skip_nonfinite=True,
        **settings,
    )


class Estimator(ABC):
    """A way to turn the gradients of an epoch into a `Diversity`.

    The controller calls `bind` once, then `start` and `finish` for each measured epoch, and `on_step` before each
    optimizer step in between. If the epoch begins anew, the controller calls `close` and `start` again. Between
    `finish` and `start` nothing may be attached to the model.
    """

    name: ClassVar[str] = ""
    """The name in experiment files and in `Controller(estimator=...)`."""
    at_fixed_weights: ClassVar[bool] = True
    """Whether n * diversity - 1 is the gradient noise scale; False if gradients of many steps are added up."""
    works_on_shards: ClassVar[bool] = False
    """Whether the estimator can measure a model that FSDP2 has sharded, where no rank has whole gradients."""
    has_window: ClassVar[bool] = True
    """Whether `window` may be called within an epoch."""
    has_inner_variance: ClassVar[bool] = False
    """Whether the `Diversity` includes its `inner_variance`."""
    min_batch_size: int = 1
    """The smallest batch, in samples over all ranks, that gives an estimate; known after `bind`."""
    min_micro_batches: int = 1
    """The fewest backward passes into which the next batch must be cut."""
    min_steps_between_decisions: int = 1
    """The fewest steps between two decisions that give the second one an interval."""

    @classmethod
    def takes(cls, setting: str) -> bool:
        """Return whether the estimator's constructor has this argument."""
        return setting in inspect.signature(cls).parameters

    _context: TrainingContext | None = None

    def bind(self, context: TrainingContext) -> None:
        """Connect to a training loop; raise if its model cannot be measured."""
        if self._context is not None:
            raise UsageError("this estimator belongs to another controller already: make one for each")
        self._prepare(context)
        self._context = context

    def _prepare(self, context: TrainingContext) -> None:  # noqa: B027 (some need nothing)
        """Raise if the context lacks something that this estimator needs."""

    @property
    def context(self) -> TrainingContext:
        """The parts of the training loop; raises before `bind`."""
        if self._context is None:
            raise UsageError("this estimator belongs to no controller yet: bind() comes first")
        return self._context

    def start(self) -> None:  # noqa: B027 (some only look afterwards)
        """Begin a measured epoch."""

    def on_step(self, event: StepEvent, optimizer: Optimizer) -> None:  # noqa: B027 (some look at passes alone)
        """Read the gradients that `optimizer` is about to use."""

    def window(self) -> Diversity:
        """Return the estimate since the last call, or since `start`, and continue measuring."""
        raise UsageError(f"{type(self).__name__} sums over whole epochs and cannot be asked within one")

    @abstractmethod
    def finish(self) -> Diversity:
        """Return the epoch's estimate, and detach."""

    def close(self) -> None:  # noqa: B027 (some attach nothing)
        """Detach, whatever the state."""

    def caveat(self, context: TrainingContext) -> str:
        """Return why policies will not act on measurements in this context, with a remedy; empty if they will."""
        return ""

    def stand_in(self, context: TrainingContext, batch_size: int) -> str:
        """Return the name of the estimator to use instead, if policies would not act on this one's measurements."""
        return ""

    @property
    def replay_token(self) -> object:
        """A value that changes when recorded backward passes become invalid; None: every pass must run in Python."""
        return None

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:  # noqa: B027 (most do nothing)
        """Take in a replayed backward pass, which no hook sees.

        Args:
            gradients: The gradients of the pass's own mean loss, by the parameters' names.
            weight: The factor of that loss in the batch's loss, with the number of its samples.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of an unfinished epoch; an empty dict between epochs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (some have no state)
        """Continue an epoch; called after `start`."""
