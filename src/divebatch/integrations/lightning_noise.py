"""Lightning: a callback that logs the noise scale of any training."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from divebatch.checks import require_count
from divebatch.errors import ArgumentError
from divebatch.integrations.lightning_package import LightningCallback
from divebatch.noise_meter import NoiseMeter, NoiseScale


class NoiseScaleCallback(LightningCallback):  # type: ignore[misc]
    """Logs the gradient noise scale of a training that is otherwise left alone: any loader, any loop of Lightning's.

        trainer = Trainer(callbacks=[NoiseScaleCallback()])

    Every `every_steps` optimizer steps the loggers get `noise_scale`, and the ends of its 95 % interval,
    `noise_scale_low` and `noise_scale_high`, all in samples. `noise_scale` is left out where it is not known, and
    `noise_scale_high` where nothing bounds it (`NoiseMeter` tells what the meter can see). `readings` has them all.

    Without `batch_size` the samples of a step are counted in the batches: the first dimension of a batch's first
    tensor, summed over the passes of a step, times the number of processes, which are taken to have as many each. A
    reading goes by the size that most of its steps had, so that an epoch's short last step does not matter. Where the
    size changes for good, as beside a `BatchSizeCallback`, the steps before are dropped and a new reading begins.

    Args:
        every_steps: Optimizer steps between two readings.
        batch_size: Samples of an optimizer step, of all passes and processes together; None to count them.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them.
    """

    def __init__(self, *, every_steps: int = 100, batch_size: int | None = None, preconditioned: bool = False) -> None:
        require_count("every_steps", every_steps)
        if batch_size is not None:
            require_count("batch_size", batch_size)
        self.every_steps, self.batch_size, self.preconditioned = every_steps, batch_size, preconditioned
        self.readings: list[NoiseScale] = []
        self._meter: NoiseMeter | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizer exists now."""
        if len(trainer.optimizers) != 1:
            raise ArgumentError(f"one optimizer can be watched, the module has {len(trainer.optimizers)}")
        self._meter = NoiseMeter(trainer.optimizers[0], preconditioned=self.preconditioned)
        self._sizes: Counter[int] = Counter()
        """How many steps since the last reading had so many samples."""
        self._samples = 0
        """Samples of this process since the last step."""
        self._last_size = self._usual_size = 0
        """Samples of the last step, and of the last two that had equally many; 0 before there are any."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A checkpoint has been loaded, and the steps of before with it."""
        self._at_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A pass was made, and perhaps a step."""
        if self.batch_size is None:
            self._samples += _num_samples(batch)
        if trainer.global_step == self._at_step:
            return
        self._count_step(self.batch_size or self._samples * trainer.world_size)
        self._at_step, self._samples = trainer.global_step, 0
        if self._sizes.total() >= self.every_steps:
            self._read(trainer)

    def _count_step(self, size: int) -> None:
        assert self._meter is not None
        has_changed = size == self._last_size != self._usual_size  # twice in a row: not an epoch's short last step
        is_first, self._last_size = self._usual_size == 0, size
        if has_changed:
            self._usual_size = size
        if has_changed and not is_first:
            self._meter.read(size)
            self._sizes.clear()
        else:
            self._sizes[size] += 1

    def _read(self, trainer: Any) -> None:
        assert self._meter is not None
        reading = self._meter.read(self._sizes.most_common(1)[0][0])
        self._sizes.clear()
        self.readings.append(reading)
        metrics = {f"noise_scale{end}": value for end, value in _known(reading).items()}
        trainer.callback_metrics.update({name: Tensor([value])[0] for name, value in metrics.items()})
        # To the loggers themselves: `log` would drop what does not fall on a multiple of log_every_n_steps.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls this and not `teardown` when something fails."""
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fit is over."""
        self._leave()

    def _leave(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = None


def _known(reading: NoiseScale) -> dict[str, float]:
    values = {"": reading.value, "_low": reading.low, "_high": reading.high}
    return {end: value for end, value in values.items() if abs(value) < float("inf")}  # NaN is not


def _num_samples(batch: Any) -> int:
    """The first dimension of its first tensor."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    if (first := next(tensors, None)) is None:
        raise ArgumentError(
            f"a batch of type {type(batch).__name__} shows no tensor whose samples could be counted: pass "
            f"NoiseScaleCallback(batch_size=...), the samples of an optimizer step"
        )
    return len(first)
