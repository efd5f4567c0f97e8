"""The reference trainer: a training loop with a controller, plus evaluation, timing and state."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.controller import Controller
from divebatch.data.order import mixed_seed
from divebatch.errors import DivergedError
from divebatch.lab.clock import Clock, forget_peak_memory
from divebatch.lab.length import RunLength
from divebatch.lab.ranks import Parallel
from divebatch.lab.step import DeviceOptions, LossFn, Tally, TrainStep, device_settings, train_epoch
from divebatch.lab.tasks import Task, evaluate
from divebatch.norms import gradient_diversity
from divebatch.norms.sketch import load_signs_state, seed_signs, signs_state
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord
from divebatch.research import QuantizedGradients

logger = logging.getLogger(__name__)

RANK = 6
"""The purpose of a rank's random numbers, different from all other purposes of numbers from the seed."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The parts of a run; `run_epoch` trains an epoch."""

    model: nn.Module
    optimizer: Optimizer
    schedulers: Sequence[LRScheduler]
    """Schedulers that are stepped after each epoch."""
    control: Controller
    task: Task
    """The task with the training loss and the score on validation data."""
    validation: Iterable[Any]
    clock: Clock
    step_schedulers: Sequence[LRScheduler] = ()
    """Schedulers that are stepped after each optimizer step."""
    length: RunLength | None = None
    """The length of a run whose epochs are parts of one pass. None: epochs are passes."""
    clip_norm: float | None = None
    """The norm to which larger gradients are scaled down. None: no clipping."""
    options: DeviceOptions = field(default_factory=DeviceOptions)
    log_exact: bool = False
    data_fingerprint: str = ""
    """A hash of the training and validation samples."""
    parallel: Parallel = None  # type: ignore[assignment]
    """The model on its ranks. None: one rank."""
    quantize: QuantizedGradients | None = None
    """The random rounding of the gradients of `model`. None: no rounding."""
    step: TrainStep = field(init=False)
    tally: Tally = field(init=False, default_factory=Tally)

    def __post_init__(self) -> None:
        self.parallel = self.parallel or Parallel.alone(self.model)
        self.step = TrainStep(
            self.parallel,
            self.loss_fn,
            self.optimizer,
            self.options,
            self.clock,
            plan=lambda: self.control.plan(),
            on_outgrown=self._outgrown if self.parallel.ranks.is_alone else None,
            clip_norm=self.clip_norm,
        )

    @property
    def loss_fn(self) -> LossFn:
        return self.task.loss_fn

    @property
    def ranks(self) -> Ranks:
        return self.parallel.ranks

    @property
    def all_schedulers(self) -> list[LRScheduler]:
        return [*self.schedulers, *self.step_schedulers]

    def run_epoch(self, *, after_step: Callable[[], None] = lambda: None) -> EpochRecord:
        """Train an epoch, let the controller decide, evaluate.

        Measuring counts as training time, but evaluation and compilation do not. `after_step` may save or raise.
        """
        with device_settings(self.options.precision, self.clock.device):
            with self.clock.lap("train"):
                train_loss = self._train(after_step)
                with self.clock.lap("measure"):
                    record = self.control.step(loss=train_loss)
            if self.length is not None:
                record = replace(record, epoch=self.length.end_part())
            peak = self.step.peak_memory_bytes
            with self.clock.lap("evaluate"):
                self.parallel.average_buffers()
                seen = evaluate(
                    self.model, self.validation, self.task, precision=self.options.precision, ranks=self.ranks
                )
            exact: float | None = None
            if self.log_exact:  # on the whole training set, at the epoch's last weights
                batches = self.control.loader.full_pass()
                diversity = gradient_diversity(self.model, self.loss_fn, batches, ranks=self.ranks)
                exact = diversity.value if diversity.is_defined else None
        return replace(
            record,
            train_loss=train_loss,
            val_loss=seen.loss,
            val_accuracy=seen.accuracy,
            bits_per_byte=seen.bits_per_byte,
            exact_diversity=exact,
            micro_batch_size=self.options.micro_batch_size,
            recompiles=self.step.num_compiled,
            **self._costs(peak),
        )

    def _train(self, after_step: Callable[[], None]) -> float:
        def step_schedulers() -> None:
            for scheduler in self.step_schedulers:
                scheduler.step()
            after_step()

        self.model.train()
        forget_peak_memory(self.clock.device)
        train_loss = train_epoch(self.step, self.control.loader, self.tally, step_schedulers)
        if not math.isfinite(train_loss):
            raise DivergedError(f"the training loss of epoch {self.control.epoch + 1} is {train_loss}")
        self.tally = Tally()
        for scheduler in self.schedulers:
            scheduler.step()
        return train_loss

    def _outgrown(self, failed: int, fitted: int) -> None:
        """Return for good to the batch size that fitted into memory, after the batch outgrew it."""
        logger.warning(
            "out of memory: a batch of %d samples does not fit, %d did; no larger one follows", failed, fitted
        )
        self.control.limit_batch_size(fitted)

    def _costs(self, peak: int) -> dict[str, Any]:
        """Return the seconds and bytes so far, each the largest over ranks."""
        seconds = {
            "train_seconds": self.clock.train_seconds,
            "eval_seconds": self.clock.seconds("evaluate"),
            "compile_seconds": self.clock.seconds("compile"),
            "measure_seconds": self.clock.seconds("measure"),
            "total_seconds": self.clock.total_seconds,
        }
        *most, most_bytes = map(max, zip(*self.ranks.gather([*seconds.values(), peak]), strict=True))
        return {**dict(zip(seconds, most, strict=True)), "peak_memory_bytes": int(most_bytes)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs, also in the middle of an epoch.

        All ranks must call this method; rank 0 gets whole tensors and the sums over ranks.
        """
        self.parallel.average_buffers()
        loss_sum, num_samples = self.tally.loss_sum, self.tally.num_samples
        if not self.ranks.is_alone:
            total, count = self.ranks.sum_numbers([loss_sum.item(), num_samples])
            loss_sum, num_samples = torch.tensor(total, dtype=torch.float64), int(count)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.all_schedulers],
            "control": self.control.state_dict(),
            "clock": self.clock.state_dict(),
            "compiled": self.step.num_compiled,
            "parts_done": self.length.done if self.length is not None else None,
            "tally": (loss_sum, num_samples),
            "random": torch.get_rng_state(),
            "signs": signs_state(self.clock.device),
            "quantize": self.quantize.state_dict() if self.quantize is not None else None,
            "cuda_random": torch.cuda.get_rng_state(self.clock.device) if self._on_cuda else None,
        }
        gathered: dict[str, Any] = self.parallel.gathered(state)
        return gathered

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = self.parallel.sharded(state, self.optimizer)
        self.control.load_state_dict(state["control"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for scheduler, saved in zip(self.all_schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if self.quantize is not None:
            self.quantize.load_state_dict(state["quantize"])
        self.clock.load_state_dict(state["clock"])
        self.step.compiled_before = state["compiled"]
        if self.length is not None:
            self.length.done = state["parts_done"]
        # The saved sums are over all ranks: the first rank continues with them, the others start at zero.
        self.tally = Tally(*state["tally"]) if self.ranks.is_first else Tally()
        # Steps were made before the resume; without this a scheduler would warn if the epoch has no step left.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if not self.ranks.is_first:
            self.draw_apart()
            return
        torch.set_rng_state(state["random"].cpu())
        load_signs_state(self.clock.device, state["signs"])
        if self._on_cuda and state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"].cpu(), self.clock.device)

    def draw_apart(self) -> None:
        """Seed torch differently on each rank, because dropout and sketches must be independent."""
        loader = self.control.loader
        seed = mixed_seed(loader.seed, loader.samples_delivered, RANK, self.ranks.rank)
        torch.manual_seed(seed)
        seed_signs(self.clock.device, seed)

    @property
    def _on_cuda(self) -> bool:
        return self.clock.device.type == "cuda"
