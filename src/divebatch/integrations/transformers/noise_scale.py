"""The gradient noise scale in the logs of any Trainer."""

import math
from typing import Any

from divebatch.checks import require_count
from divebatch.integrations.transformers.framework import TrainerCallback
from divebatch.noise_meter import NoiseMeter


class NoiseScaleCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the gradient noise scale of a plain `transformers.Trainer`, which it leaves as it is.

        trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[NoiseScaleCallback()])

    Each log of the training loss also has `noise_scale` and the ends of its 95 % interval, `noise_scale_low` and
    `noise_scale_high`, all in sequences, over the steps since the last reading. A number that is not known or infinite
    is left out. `NoiseMeter` measures: what it can and cannot see holds here.

    The Trainer calls its own reporters (W&B, TensorBoard) before `callbacks=[...]`; for them put this callback first:
    `NoiseScaleCallback().add_to(trainer)`.

    Args:
        every_steps: Read, and let the Trainer log, after each so many optimizer steps; None for whenever it logs.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them.
        sketch: Whether gradients are kept as sketches or whole; None for sketches where the model is large.
    """

    def __init__(
        self, *, every_steps: int | None = None, preconditioned: bool = False, sketch: bool | None = None
    ) -> None:
        if every_steps is not None:
            require_count("every_steps", every_steps)
        self._every_steps = every_steps
        self._settings: dict[str, Any] = {"preconditioned": preconditioned, "sketch": sketch}
        self._meter: NoiseMeter | None = None
        self._batch_size = 0

    def add_to(self, trainer: Any) -> None:
        """Join `trainer` before its reporters, so that they are given the noise scale too.

        Args:
            trainer: The `transformers.Trainer`.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The optimizer exists now."""
        self.on_train_end(args, state, control)  # where the training before ended with an error
        self._meter = NoiseMeter(parts["optimizer"], **self._settings)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A reading has one batch size for all its steps: after a change it begins anew."""
        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        if size != self._batch_size and self._has_seen_steps:
            self._read()
        self._batch_size = size

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the Trainer log where a reading is due."""
        control.should_log |= self._every_steps is not None and self._is_due(state)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Add the reading to what is logged of the training loss."""
        if "loss" not in logs or not self._has_seen_steps or not self._is_due(state):
            return
        reading = self._read()
        logs.update(reading)
        state.log_history[-1].update(reading)  # a copy that was made before

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the hook off the optimizer."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None

    def _is_due(self, state: Any) -> bool:
        return self._every_steps is None or state.global_step % self._every_steps == 0

    @property
    def _has_seen_steps(self) -> bool:
        """Not where a GradScaler has skipped all steps since the last reading."""
        return self._meter is not None and self._meter._steps > 0

    def _read(self) -> dict[str, float]:
        assert self._meter is not None
        found = self._meter.read(self._batch_size)
        named = {"noise_scale": found.value, "noise_scale_low": found.low, "noise_scale_high": found.high}
        return {name: value for name, value in named.items() if math.isfinite(value)}
