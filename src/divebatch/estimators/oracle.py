"""The paper's Oracle: exact diversity of the whole dataset at the weights an epoch ended with."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators.estimator import Scene, require_whole
from divebatch.measurement import Diversity
from divebatch.norms import gradient_diversity
from divebatch.norms.registry import cover


class Oracle:
    """Exact, unbiased, and dear: one more forward and backward pass over all data after each measured epoch.

    It needs the loss, `loss_fn(model(inputs), targets)`, given here or to the controller; batches must be
    `(inputs, targets)`. Nothing is attached to the model during training. Ranks share the pass.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor] | None = None) -> None:
        self._loss_fn = loss_fn
        self._scene: Scene | None = None

    def bind(self, scene: Scene) -> None:
        """Check the model and that there is a loss."""
        if self._loss_fn is None and scene.loss_fn is None:
            raise ArgumentError(
                "the oracle runs the model by itself and needs the loss: "
                "pass Controller(..., estimator='oracle', loss_fn=...) or estimator=Oracle(loss_fn)"
            )
        require_whole(scene, "oracle")
        cover(scene.model)
        self._scene = scene

    def start(self) -> None:
        """Nothing to do: the oracle looks only afterwards."""

    def restart(self) -> None:
        """Nothing to forget."""

    def window(self) -> Diversity:
        """At the present weights, like `finish`: nothing is attached."""
        return self.finish()

    def finish(self) -> Diversity:
        """One exact pass at the present weights."""
        if self._scene is None:
            raise UsageError("this estimator belongs to no controller yet: bind() comes first")
        scene, loss_fn = self._scene, self._loss_fn or self._scene.loss_fn
        assert loss_fn is not None
        batches, reduction = scene.full_pass(), scene.loss_reduction
        return gradient_diversity(scene.model, loss_fn, batches, loss_reduction=reduction, ranks=scene.ranks)

    def close(self) -> None:
        """Nothing is attached."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Nothing to check."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
