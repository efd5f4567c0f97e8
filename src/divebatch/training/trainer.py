"""The reference trainer: a user's loop with a controller, plus evaluation, timing and state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.controller import Controller
from divebatch.norms import gradient_diversity
from divebatch.records import EpochRecord
from divebatch.training.clock import Clock, peak_memory_bytes
from divebatch.training.evaluation import evaluate
from divebatch.training.loop import LossFn, train_epoch


@dataclass(slots=True)
class Trainer:
    """Everything one run needs; `run_epoch` is the whole story of an epoch."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    control: Controller
    loss_fn: LossFn
    validation: Sequence[Any]
    clock: Clock
    log_exact: bool = False

    def run_epoch(self) -> EpochRecord:
        """Train, let the controller decide, evaluate. Measuring counts as training, evaluation does not."""
        with self.clock.training():
            train_loss = train_epoch(self.model, self.optimizer, self.control.loader, self.loss_fn)
            if self.scheduler is not None:
                self.scheduler.step()
            record = self.control.step()
        seen = evaluate(self.model, self.validation, self.loss_fn)
        return replace(
            record,
            train_loss=train_loss,
            val_loss=seen.loss,
            val_accuracy=seen.accuracy,
            exact_diversity=self._exact_diversity() if self.log_exact else None,
            train_seconds=self.clock.train_seconds,
            total_seconds=self.clock.total_seconds,
            peak_memory_bytes=peak_memory_bytes(self.clock.device),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "control": self.control.state_dict(),
            "clock": self.clock.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved trainer stood; the controller checks first whether the state fits."""
        self.control.load_state_dict(state["control"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.clock.load_state_dict(state["clock"])
        torch.set_rng_state(state["random"].cpu())

    def _exact_diversity(self) -> float | None:
        """Of the whole training set at the weights the epoch ended with; None where it is undefined."""
        exact = gradient_diversity(self.model, self.loss_fn, self.control.loader.full_pass())
        return exact.value if exact.is_defined else None
