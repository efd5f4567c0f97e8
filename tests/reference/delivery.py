"""Deliveries and steps for an estimator in a loop that has no loader or no controller."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from divebatch import Diversity, micro_batches
from divebatch.estimators import Estimator, TrainingContext
from divebatch.estimators.step_hooks import tell_steps
from divebatch.measurement import StepEvent
from divebatch.ranks import Ranks, RankShard
from reference.per_sample import mean_loss, mlp, samples


class Delivered:
    """Batches whose sizes show in a count of all samples so far, which the loop keeps."""

    ranks = Ranks.alone()

    def __init__(self, count: Callable[[], int], full_pass: Callable[[], Iterable[Any]] = list) -> None:
        self._count, self.full_pass = count, full_pass
        self._before, self._size, self._batches = count(), 0, 0

    @property
    def batches_delivered(self) -> int:
        self.look()
        return self._batches

    @property
    def samples_delivered(self) -> int:
        self.look()
        return self._before

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    @property
    def rank_shard(self) -> RankShard:
        self.look()
        return RankShard(self._size, self._size)

    def look(self) -> None:
        """Take what came since the last look for one batch."""
        now = self._count()
        if now != self._before:
            self._size, self._before, self._batches = now - self._before, now, self._batches + 1


class _WhileAtWork(Estimator):
    """Passes steps on to the estimator that is at work, as a controller does."""

    def __init__(self, current: Callable[[], Estimator]) -> None:
        self._current = current

    def bind(self, context: TrainingContext) -> None:
        raise NotImplementedError

    def finish(self) -> Any:
        raise NotImplementedError

    def on_step(self, event: StepEvent, optimizer: Any) -> None:
        estimator = self._current()
        if getattr(estimator, "_average", estimator) is not None:
            estimator.on_step(event, optimizer)


def tell(
    current: Callable[[], Estimator], context: TrainingContext, *, accumulate: Callable[[], int] = lambda: 1
) -> None:
    """Tell whichever estimator is the current one of each step, while it is at work."""
    tell_steps(_WhileAtWork(current), context, accumulate=accumulate)


def attach(estimator: Estimator, context: TrainingContext) -> None:
    """Bind an estimator and tell it of steps from then on."""
    estimator.bind(context)
    if context.optimizer is not None:
        tell(lambda: estimator, context)


class Loop:
    """A user's loop without a controller, which keeps the gradient of every step; `start` begins to measure."""

    def __init__(
        self,
        estimator: Estimator,
        optimizer: Callable[[Any], Optimizer] = lambda p: SGD(p, 0.0),
        *,
        model: nn.Module | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = mean_loss,
        reduction: Literal["mean", "sum"] = "mean",
        accumulate: int = 1,
        delivered: int = 0,
        parts_of: int = 10**6,
    ) -> None:
        self.parts_of = parts_of
        self.model, self.loss_fn, self.accumulate, self.delivered = model or mlp(), loss_fn, accumulate, delivered
        self.optimizer = optimizer(self.model.parameters())
        self.delivery = Delivered(lambda: self.delivered)
        self.context = TrainingContext(self.model, self.delivery, self.optimizer, loss_reduction=reduction)
        self.gradients: list[Tensor] = []
        self.sizes: list[int] = []
        self.estimator = estimator
        estimator.bind(self.context)
        tell(lambda: self.estimator, self.context, accumulate=lambda: self.accumulate)
        estimator.start()

    def deliver(self, num_samples: int) -> None:
        """Hand out the next batch."""
        self.delivered += num_samples
        self.delivery.look()

    def step(self, batch: Any, parts_of: int | None = None) -> None:
        """Make a step on a batch, cut into parts of so many samples."""
        self.deliver(len(batch[0]))
        self.optimizer.zero_grad()
        for (x, y), weight in micro_batches(batch, parts_of or self.parts_of):
            (self.loss_fn(self.model(x), y) * weight).backward()
        self.sizes.append(len(batch[0]))
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()]))
        self.optimizer.step()

    def run(self, batches: Iterable[Any], parts_of: int | None = None) -> Diversity:
        """Measure an epoch of these batches from its beginning."""
        self.estimator.close()
        self.estimator.start()
        for batch in batches:
            self.step(batch, parts_of)
        return self.estimator.finish()

    def resume(self, estimator: Estimator) -> None:
        """Go on with another estimator, from the state of the one at work."""
        state = self.estimator.state_dict()
        self.estimator.close()
        self.estimator = estimator
        estimator.bind(self.context)
        estimator.start()
        estimator.load_state_dict(state)


def cut(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Samples that fit `mlp`, in batches."""
    x, y = samples(count)
    return list(zip(x.split(size), y.split(size), strict=True))
