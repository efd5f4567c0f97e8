"""The central loop: forward, backward, step, in one place."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from divebatch.controller import Controller
from divebatch.data.micro_batches import batch_length, cut, weighted_parts
from divebatch.errors import BatchTooLargeError
from divebatch.lab.training.forward_backward import OnReplay, Passes
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.meter import pausing_meters
from divebatch.ranks import Ranks, RankShard


@dataclass(slots=True)
class Tally:
    """The mean loss over the samples of an epoch, each at the weights it met."""

    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_samples: int = 0

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Summed on the device: reading each loss would wait for every step."""
        self.loss_sum = self.loss_sum.to(loss.device) + loss * num_samples
        self.num_samples += num_samples

    def mean(self, ranks: Ranks) -> float:
        """Over the samples of all ranks. Waits for the device."""
        loss_sum, num_samples = ranks.sum_numbers([self.loss_sum.item(), self.num_samples])
        return loss_sum / num_samples


@dataclass(slots=True)
class Step:
    """One optimizer step on one batch."""

    passes: Passes
    optimizer: Optimizer
    is_measuring: Callable[[], bool] = lambda: False
    replay_token: Callable[[], object] = lambda: True
    min_micro_batches: Callable[[], int] = lambda: 1
    """Into how many parts a batch must be cut at least: some estimators compare the parts."""
    share: Callable[[], RankShard | None] = lambda: None
    """This rank's part of the batch under way, where there are several."""
    on_replay: OnReplay = lambda _, __: None
    """For passes that no hook sees."""

    @classmethod
    def under(cls, control: Controller, passes: Passes, optimizer: Optimizer) -> "Step":
        """The way a controller's estimator needs it."""
        return cls(
            passes,
            optimizer,
            is_measuring=lambda: control.plan().measuring,
            replay_token=lambda: control.plan().replay_token,
            min_micro_batches=lambda: control.plan().min_micro_batches,
            share=lambda: control.loader.rank_shard,
            on_replay=lambda gradients, weight: control.plan().see_replay(gradients, weight),
        )

    def __call__(self, batch: Any) -> Tensor:
        """Forward, backward, step. The batch's mean loss, at the weights before the step."""
        self.optimizer.zero_grad()
        loss = self._backward(batch)
        self.optimizer.step()
        return loss

    def _backward(self, batch: Any) -> Tensor:
        try:
            return self._accumulate(batch, self.part_size(batch_length(batch)))
        except torch.OutOfMemoryError:
            pass  # what failed holds memory until here, and the advice needs to try
        raise BatchTooLargeError(self._advice(batch))

    def _accumulate(self, batch: Any, size: int) -> Tensor:
        loss: Tensor | None = None
        count = self._num_parts(batch_length(batch))
        for _ in range(count, self._rounds()):
            self._keep_company(batch)
        for number, ((inputs, targets), share) in enumerate(weighted_parts(batch, size), 1):
            part = self.passes(
                inputs,
                targets,
                share=share,
                measuring=self.is_measuring(),
                token=self.replay_token(),
                is_last=number == count,
                on_replay=self.on_replay,
            )
            loss = part if loss is None else loss + part
        assert loss is not None
        return loss

    def _num_parts(self, num_samples: int) -> int:
        return math.ceil(num_samples / self.part_size(num_samples))

    def _rounds(self) -> int:
        """The passes of the rank that has most: a sharded model's parameters come from all ranks in every pass."""
        share = self.share()
        if share is None or not self.passes.parallel.is_sharded:
            return 0
        smallest = max(1, share.num_samples // share.num_ranks)
        return max(self._num_parts(smallest), self._num_parts(math.ceil(share.num_samples / share.num_ranks)))

    def _keep_company(self, batch: Any) -> None:
        """A pass that counts for nothing, before those that do."""
        inputs, targets = cut(batch, 0, 1)
        with pausing_meters():
            self.passes(inputs, targets, share=LossWeight(0.0), measuring=False, is_last=False)

    def part_size(self, num_samples: int) -> int:
        """The samples of one backward pass of a batch."""
        return min(self.micro_batch_size or num_samples, math.ceil(num_samples / self.min_micro_batches()))

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples of one backward pass."""
        return self.passes.setup.micro_batch_size

    def _advice(self, batch: Any) -> str:
        num_samples = batch_length(batch)
        tried = self.part_size(num_samples)
        problem = f"out of memory: batch of {num_samples} samples in micro-batches of {tried}"
        if not self.passes.parallel.ranks.is_alone:  # to try on one rank alone would wait for the others for ever
            return f"{problem} on rank {self.passes.parallel.ranks.rank}. Try --micro-batch {max(1, tried // 2)}"
        fitting = self._fitting(batch, tried)
        if fitting is None:
            return f"{problem}; not even one sample fits"
        return f"{problem}. Micro-batches of {fitting} fit: use --micro-batch {fitting}"

    def _fitting(self, batch: Any, tried: int) -> int | None:
        """The largest half, quarter, ... of what was tried that runs."""
        while tried > 1:
            tried //= 2
            self.optimizer.zero_grad()
            part, _ = next(weighted_parts(batch, tried))
            try:
                self._accumulate(part, tried)
            except torch.OutOfMemoryError:
                continue
            return tried
        return None


def train_epoch(
    step: Callable[[Any], Tensor],
    batches: Iterable[Any],
    tally: Tally,
    after_step: Callable[[], None],
    *,
    ranks: Ranks | None = None,
    share: Callable[[], RankShard | None] = lambda: None,
) -> float:
    """One step on each batch; the mean loss over the epoch's samples of all ranks. `share` is this rank's part."""
    for batch in batches:
        loss, mine = step(batch), share()
        if mine is None or not mine.is_stand_in:
            tally.add(loss, batch_length(batch))
        after_step()
    return tally.mean(ranks or Ranks.alone())
