"""How the batch under way must go through the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from divebatch.norms.loss_scale import LossWeight
from divebatch.ranks import RankShard


def _ignore(_: Mapping[str, Tensor], __: LossWeight) -> None:
    """Nobody measures, so nobody needs to see a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What `Controller.plan()` says of the batch delivered last. The defaults are those of a loop without a controller.

    Args:
        measuring: whether an estimator watches this batch.
        min_micro_batches: the fewest backward passes that the batch must be cut into: some estimators compare them.
        replay_token: a recorded backward pass may be replayed for as long as this stays equal; None where the
            estimator needs Python in every pass.
        batch_size: samples of a full batch on this rank, where the last ones of an epoch may have fewer; None: this one
            counts as full.
        rank_shard: this rank's samples of the batch; None where there is no controller.
        see_replay: takes the gradients of a replayed pass, by the parameters' names, and the weight of its loss: no
            hook sees a replay.
    """

    measuring: bool = False
    min_micro_batches: int = 1
    replay_token: object = True
    batch_size: int | None = None
    rank_shard: RankShard | None = None
    see_replay: Callable[[Mapping[str, Tensor], LossWeight], None] = _ignore
