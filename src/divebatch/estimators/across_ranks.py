"""An unbiased estimate from what ranks know anyway: their own gradients, and the mean that the optimizer gets."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from divebatch.estimators.average import PairAverage, unbiased
from divebatch.estimators.chunk_gradients import sq_norm
from divebatch.estimators.estimator import Scene
from divebatch.estimators.optimizer_events import scale_of_gradients
from divebatch.estimators.split import NOTHING_CUT, BatchWatch, require_mean
from divebatch.estimators.stepwise import Source, Stepwise
from divebatch.norms.accumulators import trainable
from divebatch.norms.loss_scale import LossWeight
from divebatch.ranks import Ranks

COLUMNS = 5
"""Numbers of a step's row: sum of s_j ||g_j||^2, squared norm of what the optimizer gets, chunks, samples, and the
squared sum of the weights that the optimizer's gradient is added up with. Rows of ranks add up."""


class AcrossRanks(Stepwise):
    """Compares ranks and micro-batches as chunks of one batch at the same weights: what they agree on is signal.

    Each rank squares its own gradient before DDP averages it, and the first one the average that the optimizer gets.
    Those few numbers a step are kept and added over ranks once an epoch: no step communicates more than without. The
    loss must be a mean over samples. One process alone has only its micro-batches for chunks, as in `split`.

    Bias: none, with chunks of any sizes. Cost: two norms a step and no copy of the parameters. k chunks scatter as a
    batch of k samples would. Gradients must reach the optimizer as the backward passes made them: under clipping use
    `split`. A GradScaler that skips a step leaves out its batch and the next, whose passes are compared with it.

    Args:
        decay: below 1 for an exponential mean over steps; 0.95 looks back some twenty steps.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses, where there is one.
    """

    name = "ranks"

    def __init__(self, *, decay: float = 1.0, grad_scaler: Any = None) -> None:
        super().__init__(RankChunks(grad_scaler=grad_scaler), decay=decay)


class RankChunks(Source):
    """The backward passes of all ranks between two optimizer steps, as chunks of one batch, by their norms alone."""

    nothing_seen = NOTHING_CUT
    takes_replays = True
    added_noise = "mixed"  # the chunks are without it, and their mean is what the optimizer gets

    def __init__(self, *, grad_scaler: Any = None) -> None:
        self._ranks, self._grad_scaler = Ranks.alone(), grad_scaler

    @property
    def min_micro_batches(self) -> int:
        return 2 if self._ranks.is_alone else 1

    def min_batch_size(self, ranks: Ranks) -> int:
        """One sample for each of two or more chunks."""
        return max(2, ranks.size)

    def prepare(self, scene: Scene) -> None:
        require_mean(scene, AcrossRanks.name)
        scene.require_optimizer(AcrossRanks.name)
        self._ranks = scene.delivery.ranks

    def attach(self, scene: Scene, decay: float) -> "RankRows":
        self._parameters = trainable(scene.model)
        self._rows = RankRows(decay)
        self._begin_batch()
        self._batches = BatchWatch(
            scene,
            self._parameters,
            self._add,
            self._end_of_batch,
            lambda: True,
            self._grad_scaler,
            reads_gradients=True,
        )
        return self._rows

    def detach(self) -> None:
        self._batches.close()

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        self._batches.take_replay(gradients, weight)

    def _begin_batch(self) -> None:
        self._weighted: list[Tensor] = []
        """s_j ||g_j||^2 of each chunk so far."""
        self._num_samples, self._sum_of_weights = 0, 0.0

    def _add(self, gradients: Mapping[str, Tensor], num_samples: int, weight: float, scale: float) -> None:
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients.values()]
        self._weighted.append(num_samples * scale**2 * sq_norm(dense))
        self._num_samples += num_samples
        self._sum_of_weights += weight

    def _end_of_batch(self, _: int, optimizer: Optimizer) -> None:
        """Keep the step's row."""
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=next(iter(self._parameters.values())).device)
        if self._weighted:
            row[0] = torch.stack(self._weighted).sum()
        row[1] = self._sq_norm_of_mean() / scale_of_gradients(optimizer) ** 2
        row[2].fill_(len(self._weighted))
        row[3].fill_(self._num_samples)
        if self._ranks.is_first:
            row[4].fill_(self._sum_of_weights**2)
        # Kept and not sent: rows are added over ranks once an epoch, so no step communicates more.
        self._rows.rows.append(row)
        self._begin_batch()

    def _sq_norm_of_mean(self) -> Tensor:
        """What this rank adds to the squared norm of what the optimizer gets."""
        # It is the same on all ranks: in the first one's row alone, adding rows up counts it once.
        return sq_norm(
            [p.grad for p in self._parameters.values() if p.grad is not None] if self._ranks.is_first else []
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._batches.state_dict(),
            "weighted": [*map(float, self._weighted)],
            "sum_of_weights": self._sum_of_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)
        device = next(iter(self._parameters.values())).device
        self._weighted = [torch.tensor(each, dtype=torch.float64, device=device) for each in state["weighted"]]
        self._num_samples, self._sum_of_weights = state["num_samples"], state["sum_of_weights"]


class RankRows:
    """A row of numbers for each step, which add up over ranks to what an estimate is made from."""

    def __init__(self, decay: float, rows: list[Tensor] | None = None) -> None:
        self._decay, self.rows = decay, rows or []

    def over(self, ranks: Ranks) -> Self:
        """All ranks' rows added up; a collective."""
        rows = torch.stack([row.cpu() for row in self.rows]) if self.rows else torch.zeros(0, COLUMNS).double()
        ranks.sum_([rows])
        return type(self)(self._decay, list(rows))

    def average(self) -> PairAverage:
        """The mean over steps of rows that were added up."""
        average = PairAverage(decay=self._decay)
        if self.rows:
            weighted, mean, chunks, samples, sq_weights = torch.stack(self.rows).unbind(1)
            pairs = torch.stack(unbiased(weighted, mean / sq_weights, chunks, samples), 1)
            average.num_samples = int(samples.sum())
            average.extend(pairs.tolist(), (samples * (chunks > 1)).tolist())
        return average

    def forget(self) -> None:
        """Drop all rows."""
        self.rows = []

    def state_dict(self) -> dict[str, Any]:
        """The rows, as numbers."""
        return {"rows": [row.tolist() for row in self.rows]}

    def load_state_dict(self, state: dict[str, Any], *, is_first: bool) -> None:
        """Go on with saved rows. Other ranks than the first have rows of zeros, which add nothing."""
        # Saved rows are those of all ranks, so only one rank may bring them in again.
        rows = torch.tensor(state["rows"], dtype=torch.float64)
        self.rows = list(rows if is_first else torch.zeros_like(rows))
