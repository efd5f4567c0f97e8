"""Estimates at fixed weights: one small estimate a step or so, averaged over an epoch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from divebatch.checks import require_count
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.estimator import Estimator, NoiseSeen, Scene
from divebatch.measurement import Diversity
from divebatch.norms.loss_scale import LossWeight
from divebatch.ranks import Ranks


class Estimates(Protocol):
    """What a source has collected: a `PairAverage`, or numbers that make one once all ranks' are added up."""

    def over(self, ranks: Ranks) -> Self:
        """Return those of all ranks together; a collective."""
        ...

    def average(self) -> PairAverage:
        """Return their mean."""
        ...

    def forget(self) -> None:
        """Begin anew."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any], *, is_first: bool) -> None:
        """Go on with saved numbers, which the first rank takes over."""
        ...


class Source(ABC):
    """Where estimates of single steps come from: what one idea watches in a training loop, from attach to detach."""

    nothing_seen: ClassVar[str]
    """The error where a whole epoch showed nothing."""
    may_see_nothing: ClassVar[bool] = False
    """Whether an epoch with too few steps for an estimate is no error."""
    takes_replays: ClassVar[bool] = False
    """Whether it can do with backward passes that are recorded once and replayed."""
    every_steps: int = 1
    """Steps from one estimate to the next, where most are left out."""
    added_noise: NoiseSeen = "nowhere"
    """Where noise shows that is added to gradients after their backward pass."""

    @property
    def min_micro_batches(self) -> int:
        """How many backward passes the next batch must be cut into at least."""
        return 1

    def min_batch_size(self, ranks: Ranks) -> int:
        """How many samples a batch must have, over all ranks, for it to show anything."""
        return 1

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:  # noqa: B027 (most do nothing)
        """Take in a replayed pass: the gradients of its own mean loss, and the weight of that."""

    def caveat(self, scene: Scene) -> str:
        """Say why policies will not act on what this shows there; empty where they will."""
        return ""

    @abstractmethod
    def prepare(self, scene: Scene) -> None:
        """Raise if the scene has not what this source needs."""

    @abstractmethod
    def attach(self, scene: Scene, decay: float) -> Estimates:
        """Begin to watch, with nothing seen; returns what will be filled."""

    @abstractmethod
    def detach(self) -> None:
        """Take all hooks off and free all memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way beside the estimates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (some have nothing to load)
        """Go on with what was under way; called after `attach`."""


class Stepwise(Estimator):
    """Averages pairs (tr(Sigma), ||G||^2) of single steps, each at its own weights, over an epoch.

    The interval comes from the scatter between steps. It also holds what the weights' way through the epoch adds, so
    it is too wide rather than too narrow. An estimate with gradients that are not finite is left out. Where ranks share
    the batches, each estimates from what it sees, and the mean is over all. An estimator built on this names its source
    and says what it can do; it overrides no method.

    Where decisions come every so many steps, each sees the steps since the last one. An exponential mean goes on
    through the decisions of an epoch instead: it forgets by itself.

    Args:
        source: where the estimates of single steps come from.
        decay: below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
    """

    def __init__(self, source: Source, *, decay: float = 1.0) -> None:
        self._source, self._decay = source, PairAverage(decay=decay).decay
        self._estimates: Estimates | None = None
        """What was seen, while an epoch is measured."""
        self._scene: Scene | None = None
        self._was_read = False

    @property
    def added_noise(self) -> NoiseSeen:
        seen = self._source.added_noise
        # An exponential mean goes on through readings, and the noise that was added is told for each by itself.
        return "mixed" if seen == "in trace" and self._decay < 1 else seen

    @property
    def min_micro_batches(self) -> int:
        return self._source.min_micro_batches

    @property
    def min_batch_size(self) -> int:
        return self._source.min_batch_size(self._bound().delivery.ranks)

    @property
    def min_steps_between_decisions(self) -> int:
        """Each decision must see two estimates; an exponential mean goes on through them."""
        return 2 * self._source.every_steps if self._source.every_steps > 1 and self._decay == 1 else 1

    @property
    def replay_token(self) -> object:
        return True if self._source.takes_replays else None

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        if self._estimates is not None:
            self._source.see_replay(gradients, weight)

    def caveat(self, scene: Scene) -> str:
        return self._source.caveat(scene)

    def bind(self, scene: Scene) -> None:
        if self._scene is not None:
            raise UsageError("this estimator belongs to another controller already: make one for each")
        self._source.prepare(scene)
        self._scene = scene

    def start(self) -> None:
        self._was_read = False
        self._estimates = self._source.attach(self._bound(), self._decay)

    def window(self) -> Diversity:
        self._was_read = True
        seen = self._seen()
        # An exponential mean forgets by itself and goes on through an epoch's decisions.
        if self._decay == 1:
            self._at_work().forget()
        return seen

    def finish(self) -> Diversity:
        seen = self._seen()
        self.close()
        return seen

    def close(self) -> None:
        if self._estimates is not None:
            self._source.detach()
        self._estimates = None

    def state_dict(self) -> dict[str, Any]:
        if self._estimates is None:
            return {}
        return {
            # Those of all ranks, so that the number of ranks may change at a resume.
            "estimates": self._estimates.over(self._ranks()).state_dict(),
            "source": self._source.state_dict(),
            "was_read": self._was_read,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._at_work().load_state_dict(state["estimates"], is_first=self._ranks().is_first)
        self._was_read = state["was_read"]

    def _seen(self) -> Diversity:
        average = self._at_work().over(self._ranks()).average()
        if not average.is_empty:
            return average.diversity()
        # A few steps may show nothing, a last batch of one sample for instance; a whole epoch should have.
        too_few = self._source.may_see_nothing and average.num_samples
        if self._was_read or too_few or average.skipped_samples:
            return average.unknown()
        raise UsageError(self._source.nothing_seen)

    def _ranks(self) -> Ranks:
        """The ranks whose estimates must be brought together, since each sees samples of its own."""
        # Gradients that DDP has averaged are alike on all ranks: adding them up would count them several times.
        return Ranks.alone() if self.sees_all_ranks else self._bound().delivery.ranks

    def _at_work(self) -> Estimates:
        self._bound()
        if self._estimates is None:
            raise UsageError("this estimator measures nothing now: start() comes first")
        return self._estimates

    def _bound(self) -> Scene:
        if self._scene is None:
            raise UsageError("this estimator belongs to no controller yet: bind() comes first")
        return self._scene


def require_settings(*, preconditioned: bool, every_steps: int) -> None:
    """Raise for settings of `Split` and `Moments` that make no sense."""
    if not isinstance(preconditioned, bool):
        raise ArgumentError(f"preconditioned must be True or False, got preconditioned={preconditioned!r}")
    require_count("every_steps", every_steps)
