"""Chunks of a batch that all ranks share: the micro-batches of a model that FSDP2 has sharded.

FSDP2 averages the gradients of a backward pass over ranks, and a rank gets its shard of the mean. Where each pass is
averaged by itself, the difference that it makes to `.grad` is the gradient of all ranks' micro-batches together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from divebatch.errors import UsageError
from divebatch.estimators.average import Norms, Row
from divebatch.estimators.chunk_gradients import Chunks
from divebatch.estimators.optimizer_events import OnPass, when_pass_begins
from divebatch.norms.loss_scale import LossWeight, weight_of_pass
from divebatch.norms.sharded import local
from divebatch.ranks import Ranks


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A `Row` of chunks whose sizes are known when those of all ranks are added up."""

    row: Row
    """Has the samples of a chunk's batch in the place of its own, as its gradient was divided by them."""
    sizes: Sequence[int]
    """This rank's samples of each chunk."""
    num_samples: int
    """Samples in all chunks, of all ranks."""
    copies: int
    """Ranks that hold the same shards, whose norms are therefore added up so many times."""

    @property
    def parts(self) -> list[Norms]:
        """All that is to be read."""
        return [*self.row.parts, *map(float, self.sizes)]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float]:
        """tr(Sigma), ||G||^2 and Var_i<g_i, g>, from what `parts` were read as."""
        count = len(self.sizes)
        sizes = [round(size) for size in values[-count:]]
        factors = [(whole / size) ** 2 for whole, size in zip(self.row.sizes, sizes, strict=True)]
        return replace(self.row, sizes=sizes, factors=factors).numbers([each / self.copies for each in values[:-count]])


class SharedChunks(Chunks):
    """Adds up the shards of chunk gradients; costs a copy of this rank's shards. See `Chunks` for `optimizer`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, optimizer: Optimizer | None) -> None:
        super().__init__(parameters, optimizer=optimizer)
        self._copies = ranks.size // self.shards.ranks.size

    def forget(self) -> None:
        """Drop all chunks."""
        super().forget()
        self._mine: list[int] = []
        self._num_samples = 0.0

    def add_shared(self, gradients: Mapping[str, Tensor], mine: int, weight: float, of: int) -> None:
        """A chunk with `mine` samples on this rank, whose loss had this weight, of a batch of `of` samples."""
        before = self.num_chunks
        self.add(gradients, of)
        if self.num_chunks > before:  # there may be nothing to divide by yet
            self._mine.append(mine)
            self._num_samples += weight * of

    @property
    def num_samples(self) -> int:
        """Samples of all ranks in all chunks so far."""
        return round(self._num_samples)

    def row(self) -> SharedRow:
        """The row of two or more chunks."""
        return SharedRow(self._row(), self._mine, self.num_samples, self._copies)


class SharedPasses:
    """Hands over what each backward pass added to the shards of a model's gradients, when it has ended.

    Args:
        model: The sharded model.
        parameters: Its parameters, by name.
        on_pass: Is told of each pass.
        is_wanted: Says whether the pass under way is looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        on_pass: OnPass,
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._parameters, self._on_pass, self._is_wanted = parameters, on_pass, is_wanted
        self._task, self._is_averaged = -1, True
        self._before: dict[str, Tensor] = {}
        self._received: set[str] = set()
        self._handles: list[RemovableHandle] = [when_pass_begins(model, self._begin)]
        for name, parameter in parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._receive, name)))

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task or not self._is_wanted():
            return
        if not self._is_averaged:
            raise UsageError(
                "'split' compares backward passes of a model that FSDP2 has sharded by the gradients that it averages "
                "over ranks, and a pass was not averaged: leave set_requires_gradient_sync(False) out, or use 'moments'"
            )
        self._task, self._is_averaged, self._received = task, False, set()
        held = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._before = {name: local(gradient).clone() for name, gradient in held.items()}

    def _receive(self, name: str, _: Tensor) -> None:
        if torch._C._current_graph_task_id() != self._task:
            return
        self._received.add(name)
        if not self._is_averaged:
            self._is_averaged = True
            # FSDP2 has asked for a call at the end already, in which it may average the last gradients.
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        gradients: dict[str, Tensor] = {}
        for name in self._parameters:
            if name in self._received:
                gradient: Any = self._parameters[name].grad
                now, before = local(gradient), self._before.get(name)
                gradients[name] = now if before is None else now - before
        self._before = {}
        weight = weight_of_pass(self._task)
        if self._handles:
            self._on_pass(gradients, LossWeight(1.0) if weight is None else weight)
