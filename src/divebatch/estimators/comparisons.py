"""How gradients of successive steps are compared: extrapolated or in windows, kept whole or as sketches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.estimators.average import Readable
from divebatch.estimators.chunk_gradients import Chunks
from divebatch.estimators.chunk_products import SketchedChunks
from divebatch.estimators.estimator import NoiseSeen, Scene
from divebatch.estimators.lagged_products import KEPT, Lagged, extrapolation
from divebatch.estimators.second_moment import Preconditioner, require_second_moment
from divebatch.estimators.sketch_choice import SketchChoice, kept, signs_of
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread

PAIR = 2


class Comparison(Protocol):
    """Takes the gradients of steps and makes estimates of them."""

    @property
    def needed(self) -> int:
        """Steps that an estimate is made of."""
        ...

    @property
    def reach(self) -> int:
        """With how many of the estimates before it one has gradients in common, where there is one a step."""
        ...

    @property
    def bounds_below(self) -> bool:
        """Whether a noise scale may be told from below: not where an unknown bias makes it too large."""
        ...

    @property
    def has_inner_variance(self) -> bool:
        """Whether it tells the noise along the gradient."""
        ...

    @property
    def num_chunks(self) -> int:
        """Steps that are kept now."""
        ...

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """Take in a step on so many samples."""
        ...

    def row(self) -> Readable:
        """What the last `needed` steps show."""
        ...

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """Add what the scatter between estimates does not show."""
        ...

    def forget(self) -> None:
        """Drop all steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is kept, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was kept."""
        ...


class WholeChunks(Chunks):
    """The steps of a window, as the sum of their gradients: costs one copy of the parameters."""

    reach, bounds_below, has_inner_variance = 0, False, True

    def __init__(self, parameters: Mapping[str, nn.Parameter], window: int) -> None:
        super().__init__(parameters)
        self.needed = window

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """Take in a step on so many samples."""
        self.add(dict(step), num_samples, scale=step.scale)

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """As it is: nothing is left to add."""
        return spread


@dataclass(frozen=True, slots=True)
class SuccessiveGradients:
    """Compares gradients of successive steps with each other: see `Moments` for the settings."""

    name: str
    window: int | None = None
    preconditioned: bool = False
    choice: SketchChoice = field(default_factory=SketchChoice)

    def __post_init__(self) -> None:
        if self.window is not None:
            require_count("window", self.window, at_least=PAIR)

    @property
    def added_noise(self) -> NoiseSeen:
        """Noise of different steps is independent: products of gradients have none of it, their squares have all."""
        return "mixed" if self.preconditioned else "in trace"

    def prepare(self, scene: Scene) -> None:
        """Raise if the scene has not what this way needs."""
        if self.preconditioned:
            require_second_moment(scene.require_one_optimizer("preconditioned=True", self.name))

    def caveat(self, optimizer: Optimizer) -> str:
        """Say why policies will not act on what this shows; empty where they will."""
        if self.is_extrapolated(optimizer):
            return ""
        return (
            f"{self.name!r} can only say how large it is at most where the optimizer has a momentum below 0.4, "
            "to which lr_coupling='adam' may have lowered it, or a window is set: policies that go by its interval "
            "will not grow a batch. Give the optimizer momentum, or the controller estimator='per-sample' (a model "
            "without BatchNorm) or 'split' (batches as two micro_batches)"
        )

    def preconditioner(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Preconditioner | None:
        """What divides gradients before they are compared."""
        return Preconditioner(optimizer, parameters) if self.preconditioned else None

    def is_extrapolated(self, optimizer: Optimizer) -> bool:
        """Whether gradients one and two steps apart are compared, and not windows of them."""
        return self.window is None and extrapolation(optimizer) > 0

    def start(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, *, seed: int
    ) -> tuple[Comparison, dict[str, Any]]:
        """A comparison with nothing in it, and what it must be made with to go on: see `resume`.

        `seed` is for the signs of sketches; of several ranks all must have the same.
        """
        is_lagged = self.is_extrapolated(optimizer)
        sketch = self.choice.choose(parameters, sketches=KEPT if is_lagged else PAIR, seed=seed)
        made_with = {"is_lagged": is_lagged, "sketch": sketch}
        return self.resume(made_with, parameters, optimizer), made_with

    def resume(
        self, made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> Comparison:
        """A comparison made as another was, whatever the settings are here: what was begun goes on as it was."""
        if made_with["is_lagged"]:
            return Lagged(kept(made_with["sketch"], parameters, KEPT), optimizer)
        window, signs = self.window or PAIR, signs_of(made_with["sketch"], parameters)
        return WholeChunks(parameters, window) if signs is None else SketchedChunks(signs, window)
