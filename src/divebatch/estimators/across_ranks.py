"""An unbiased estimate from what ranks know anyway: their own gradients, and the mean that the optimizer gets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.errors import CheckpointError
from divebatch.estimators.average import PairAverage, unbiased
from divebatch.estimators.chunk_gradients import sq_norm
from divebatch.estimators.estimator import Scene
from divebatch.estimators.split import Split
from divebatch.ranks import Ranks

COLUMNS = 4
"""Of a step's row: sum of s_j ||g_j||^2, squared norm of the mean, chunks, samples. Rows of ranks add up."""


class AcrossRanks(Split):
    """Ranks and micro-batches as chunks of one batch at the same weights: what they share is signal.

    Each rank squares its own gradient before DDP averages it, and the first one the average that the optimizer gets.
    Those few numbers a step are kept and added over ranks once an epoch: no step communicates more than without. The
    loss must be a mean over samples. One process alone has only its micro-batches for chunks, as in `split`.

    Bias: none, with chunks of any sizes. Cost: two norms a step and no copy of the parameters. k chunks scatter as a
    batch of k samples would. Gradients must reach the optimizer as the backward passes made them: under clipping use
    `split`, under a GradScaler `moments`. Not for FSDP2, which shows no rank its own gradient.
    """

    name = "ranks"
    has_inner_variance = False

    def __init__(self, *, decay: float = 1.0) -> None:
        super().__init__(decay=decay)
        self._rows: list[Tensor] = []
        self._sum_of_shares = 0.0

    @property
    def min_micro_batches(self) -> int:
        """Micro-batches that a rank's share must be cut into at least."""
        return 2 if self._bound().ranks.is_alone else 1

    def _attach(self, scene: Scene) -> None:
        super()._attach(scene)
        self._sum_of_shares = 0.0

    def _forget(self) -> None:
        super()._forget()
        self._rows = []

    def _new_chunks(self, scene: Scene) -> Any:
        return ChunkNorms(scene.model)

    def _add_chunk(self, num_samples: int, share: float, *, scale: float) -> None:
        super()._add_chunk(num_samples, share, scale=scale)
        self._sum_of_shares += share

    def _count(self, chunks: Any) -> None:
        """A step's row; the mean's norm is the same on all ranks and goes into the first one's."""
        gradients = [p.grad for p in chunks.parameters.values() if p.grad is not None]
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=chunks.device)
        if chunks.num_chunks:
            row[0] = chunks.weighted_sq_norms()
        if self._bound().ranks.is_first and self._sum_of_shares:
            row[1] = sq_norm(gradients) / self._sum_of_shares**2
        row[2].fill_(chunks.num_chunks)
        row[3].fill_(chunks.num_samples)
        self._rows.append(row)
        self._sum_of_shares = 0.0

    def _of_all_ranks(self) -> PairAverage:
        ranks, average = self._bound().ranks, PairAverage(decay=self._decay)
        if self._rows:
            weighted, mean, chunks, samples = self._summed_rows(ranks).unbind(1)
            pairs = torch.stack(unbiased(weighted, mean, chunks, samples), 1)
            average.extend(pairs.tolist(), (samples * (chunks > 1)).tolist())
            average.num_samples = int(samples.sum())
        return average

    def _summed_rows(self, ranks: Ranks) -> Tensor:
        rows = torch.stack([row.cpu() for row in self._rows]) if self._rows else torch.zeros(0, COLUMNS).double()
        ranks.sum_([rows])
        return rows

    def _own_state(self) -> dict[str, Any]:
        rows = self._summed_rows(self._bound().ranks).tolist()
        return {**super()._own_state(), "rows": rows, "sum_of_shares": self._sum_of_shares}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        if any(len(row) != COLUMNS for row in state["rows"]):
            raise CheckpointError(f"the checkpoint's estimator does not have rows of {COLUMNS} numbers")

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._sum_of_shares = state["sum_of_shares"]
        rows = torch.tensor(state["rows"], dtype=torch.float64)
        self._rows = list(rows if self._bound().ranks.is_first else torch.zeros_like(rows))


class ChunkNorms:
    """The squared norms of chunk gradients, without the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self.forget()

    def forget(self) -> None:
        """Back to no chunk."""
        self.num_chunks, self.num_samples = 0, 0
        self._weighted: list[Tensor] = []

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A chunk of `num_samples` samples whose mean gradient is `scale` times `gradients`."""
        self._weighted.append(num_samples * scale**2 * sq_norm([_plain(g) for g in gradients.values()]))
        self.num_chunks += 1
        self.num_samples += num_samples

    def weighted_sq_norms(self) -> Tensor:
        """The sum over chunks of s_j ||g_j||^2."""
        return torch.stack(self._weighted).sum()

    def state_dict(self) -> dict[str, Any]:
        """Chunks that wait for more, where there are any."""
        return {
            "num_chunks": self.num_chunks,
            "num_samples": self.num_samples,
            "weighted": [*map(float, self._weighted)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved chunks."""
        self.num_chunks, self.num_samples = state["num_chunks"], state["num_samples"]
        self._weighted = [torch.tensor(each, dtype=torch.float64, device=self.device) for each in state["weighted"]]


def _plain(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
