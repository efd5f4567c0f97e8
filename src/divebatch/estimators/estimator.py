"""What an estimator is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity
from divebatch.norms.sharded import is_sharded
from divebatch.ranks import Ranks, RankShard


@dataclass(frozen=True, slots=True)
class Scene:
    """What an estimator may look at."""

    model: nn.Module
    full_pass: Callable[[], Iterable[Any]]
    """Every sample once, as batches, without moving the training's own position."""
    loss_reduction: str
    loss_fn: Callable[[Any, Any], Tensor] | None
    optimizer: Optimizer | None = None
    samples_delivered: Callable[[], int] = lambda: 0
    """Samples the loader has handed to the loop so far, those of all ranks."""
    ranks: Ranks = field(default_factory=Ranks.alone)
    share: Callable[[], RankShard] | None = None
    """This rank's part of the batch delivered last."""

    local_samples_delivered: Callable[[], int] | None = None
    """Samples that came to this rank so far, where ranks share batches."""

    def loss_weight(self) -> float:
        """What this rank's loss of the batch under way is multiplied with; 0 for a stand-in."""
        return 1.0 if self.share is None else self.share().weight_for(self.loss_reduction)

    def delivered_here(self) -> int:
        """Samples that came to this rank so far."""
        return (self.local_samples_delivered or self.samples_delivered)()


def require_whole(scene: Scene, name: str) -> None:
    """For estimators that need each rank's own whole gradients."""
    if any(map(is_sharded, scene.model.parameters())):
        raise ArgumentError(
            f"estimator {name!r} needs whole gradients, and FSDP2 has sharded this model's: use estimator='trajectory'"
        )


def optimizer_of(scene: Scene, name: str) -> Optimizer:
    """The one that steps, for estimators that must know when weights change."""
    if scene.optimizer is None:
        raise ArgumentError(f"{name} must know when the optimizer steps: Scene(..., optimizer=...) has none")
    return scene.optimizer


class Estimator(Protocol):
    """Turns what an epoch's backward passes show into a `Diversity`.

    The controller calls `bind` once, then for each epoch that is to be measured `start`, `restart` if the epoch begins
    anew, and `finish`. Between `finish` and `start` nothing may be attached to the model. One that may be asked within
    an epoch also has `window`: what was seen since the last call or the start, while measuring goes on. A new estimator
    is one file in this folder and one row in `catalog.py`.
    """

    def bind(self, scene: Scene) -> None:
        """Look the model over; raise here if it cannot be measured."""
        ...

    def start(self) -> None:
        """A measured epoch begins."""
        ...

    def restart(self) -> None:
        """The epoch starts again from its beginning: forget what was seen."""
        ...

    def finish(self) -> Diversity:
        """The epoch has ended: say what it showed, and detach."""
        ...

    def close(self) -> None:
        """Detach, whatever the state."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The sums of an epoch under way; empty between epochs."""
        ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded here."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch; called after `start`."""
        ...


@runtime_checkable
class Windowed(Protocol):
    """An estimator that may be asked within an epoch."""

    def window(self) -> Diversity:
        """What was seen since the last call, or since `start`; measuring goes on."""
        ...
