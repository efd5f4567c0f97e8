"""Gradient diversity: the norm meter and the sum of gradients side by side, over any number of backward passes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.measurement import Diversity
from divebatch.norms.accumulators import addend, are_finite, kept, trainable
from divebatch.norms.adding_up import not_called
from divebatch.norms.compilation import uncompiled
from divebatch.norms.deliveries import Deliveries
from divebatch.norms.loss_scale import LossReduction
from divebatch.norms.meter import CountedPass, NormMeter, pausing_meters
from divebatch.norms.rank_weighting import without_weighing
from divebatch.norms.sharded import ShardSums, is_sharded
from divebatch.norms.sketch import sum_dtype
from divebatch.ranks import Ranks, RankShard, inside_ddp

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class PassSums:
    """Both sums of one backward pass by itself, on the device."""

    sum_of_sq_norms: Tensor
    sq_norm_of_sum: Tensor
    num_samples: int | Tensor
    """Its samples; 0 for a pass of weight zero."""
    is_finite: Tensor | None
    """Whether its gradients are finite numbers, and so count; None where every pass counts."""


class DiversityMeter:
    """Sums ||g_i||^2 and g_i over backward passes; attach, run any loop, read `diversity()`.

    The gradient sum takes each backward pass's own gradient through parameter hooks, so gradient accumulation,
    clipping and `zero_grad` do not matter. It costs one copy of the trainable parameters, and holds on to a backward
    pass's gradients until it ends: one that dies half-way must be in neither sum.

    Where `ranks` train together, reading is a collective: gradient vectors are added over ranks and then squared. What
    FSDP2 has sharded stays so: each rank sums and squares its own pieces.

    Args:
        model: its trainable parameters must all be covered by norm rules, as `NormMeter` requires.
        ranks: the processes that train together; None for this one alone.
        rank_shard: gives this rank's samples of the batch under way, where there are several ranks.
        delivered: gives how many samples a loader has delivered to this rank so far: passes over more of them are an
            error, such as a second backward pass on the same batch. None where there is no loader.
        on_pass: is told both sums of each backward pass by itself. The gradient sum then starts from zero in each pass.
        mode: "exact" norms, or "sketch" for unbiased estimates of them at far less cost.
        fallback: "vmap" measures layers without a rule by running them again, sample by sample; None refuses them.
        loss_reduction: how the loss of each backward pass is reduced over its samples, "mean" or "sum".
        compiled: whether the model is compiled with `torch.compile`.
        grad_scaler: the GradScaler that scales the losses, where there is one.
        skip_nonfinite: whether a pass whose gradients are not all finite is left out of both sums and counted apart.
            Under a GradScaler it always is. Not for what FSDP2 has sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: Ranks | None = None,
        rank_shard: Callable[[], RankShard] | None = None,
        delivered: Callable[[], int] | None = None,
        on_pass: Callable[[PassSums], None] | None = None,
        mode: Literal["exact", "sketch"] = "exact",
        fallback: Literal["vmap"] | None = None,
        loss_reduction: LossReduction = "mean",
        compiled: bool = False,
        grad_scaler: Any = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self._model, self._skips_nonfinite = model, skip_nonfinite
        self._settings: dict[str, Any] = {
            "mode": mode,
            "fallback": fallback,
            "loss_reduction": loss_reduction,
            "compiled": compiled,
            "grad_scaler": grad_scaler,
            "rank_shard": rank_shard,
        }
        self._ranks, self._on_pass = ranks or Ranks.alone(), on_pass
        self._deliveries = Deliveries(delivered)
        self._cover()
        self._handles: list[RemovableHandle] = []
        self._token = object()
        self._sums: dict[str, Tensor] = {}
        self._unit: Tensor | None = None
        """The factor that the sums are to be multiplied by when they are read; None where it has always been 1."""
        self._pending: dict[int, dict[str, Tensor]] = {}

    def _cover(self) -> None:
        self.norms = NormMeter(self._model, **self._settings)
        self.norms._on_pass = self._take
        self._parameters = trainable(self._model)
        self._shards: ShardSums | None = None
        self._reached: set[int] = set()
        if any(map(is_sharded, self._parameters.values())):
            self._require_can_be_sharded()
        elif self._skips_nonfinite:
            self.norms._skips_nonfinite = True
        self.norms._gradients_are_finite = self._pending_are_finite

    def attach(self) -> None:
        """Start counting from zero, over what is trainable now: layers may have been frozen or set free."""
        if self._parameters.keys() != trainable(self._model).keys():
            self._cover()
        self.norms.attach()
        self.reset()
        for name in self._sums:
            # A hook sees the pass's own gradient; `.grad` may hold earlier passes, or be clipped or scaled by the user.
            self._handles.append(self._parameters[name].register_hook(partial(self._receive, name)))

    def detach(self) -> None:
        """Stop counting and free the sums."""
        self.norms.detach()
        while self._handles:
            self._handles.pop().remove()
        self._sums, self._unit, self._pending = {}, None, {}
        self._drop_shards()

    @property
    def is_attached(self) -> bool:
        """Whether backward passes are being counted."""
        return self.norms._is_attached

    def reset(self) -> None:
        """Back to zero without touching the hooks."""
        self.norms.reset()
        self._deliveries.begin()
        self._token = object()
        plain = {name: p for name, p in self._parameters.items() if not is_sharded(p)}
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in plain.items()}
        self._pending = {}
        self._unit = None
        self._loaded = 0
        """Samples whose passes were before a resume."""
        self._drop_shards()
        if len(plain) < len(self._parameters):
            self._shards, self._reached = ShardSums(self._parameters, self.norms._loss_scale.of_mean_over_ranks), set()
            self.norms._call_at_start(self._shards.begin)

    def _drop_shards(self) -> None:
        if self._shards is not None:
            self._shards.detach()
        self._shards = None

    @property
    def token(self) -> object:
        """Changes whenever the sums start again: a recorded pass that adds to the old ones is of no use then.

        None as long as the first pass, which is looked at by itself, is still to come.
        """
        return self._token if self.norms._engine.is_checked else None

    def diversity(self) -> Diversity:
        """The two sums since the last reset."""
        if not self.is_attached:
            raise UsageError("this DiversityMeter is not attached: read diversity() before detaching")
        self._require_reached()
        self._deliveries.require(self.norms.num_samples + self.norms.skipped_samples - self._loaded)
        self._multiply_out()
        whole = self._ranks.sq_norm_of_sum(list(self._sums.values()))
        pieces = self._shards.sq_norm() if self._shards is not None else 0.0
        sq_norms, num_samples, skipped, of_pieces = self._ranks.sum_numbers([*self._numbers(), pieces])
        return Diversity(sq_norms, whole + of_pieces, round(num_samples), skipped_samples=round(skipped))

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks, for a checkpoint within a measured epoch; any number of ranks can go on."""
        sq_norms, num_samples, skipped = self._ranks.sum_numbers(self._numbers())
        self._multiply_out()
        sums = {name: total.clone() for name, total in self._sums.items()}
        # Of all ranks, so that the number of ranks may change at a resume; only FSDP2's shards stay in shards.
        self._ranks.sum_(list(sums.values()))
        if self._shards is not None:
            sums |= self._shards.state_dict()
        return {
            "sum_of_sq_norms": sq_norms,
            "num_samples": round(num_samples),
            "skipped_samples": round(skipped),
            "gradient_sums": sums,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums: the first rank takes them over, the others begin with nothing."""
        self.reset()
        if self._shards is not None:
            self._shards.load_state_dict(state["gradient_sums"])
        # The saved sums are those of all ranks: taken over once, any number of ranks can go on from them.
        if not self._ranks.is_first:
            return
        for name, total in self._sums.items():
            total.copy_(state["gradient_sums"][name])
        self.norms._load(state["sum_of_sq_norms"], state["num_samples"], state["skipped_samples"])
        self._loaded = state["num_samples"] + state["skipped_samples"]

    def _numbers(self) -> list[float]:
        """This rank's sum of squared norms, samples in it, and samples left out."""
        norms = self.norms
        return [norms.sum_of_sq_norms(), float(norms.num_samples), float(norms.skipped_samples)]

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _receive(self, name: str, gradient: Tensor) -> None:
        """A parameter's gradient of the backward pass under way."""
        task = torch._C._current_graph_task_id()
        pending = self._pending.get(task)
        if pending is None:
            if self.norms._is_paused:
                return
            pending = self._pending[task] = {}
            if not self.norms._layers_reached(task):  # the meter may never hear of this pass
                Variable._execution_engine.queue_callback(partial(self._check_coverage, task))
        # Held until the pass has ended: one that dies half-way must be in neither sum.
        pending[name] = gradient.detach()

    def _take(self, done: CountedPass) -> None:
        """A backward pass has ended: its gradients go into the sum."""
        if self._shards is not None:
            self._reached |= {id(layer.module) for layer in done.layers}
        received = self._received()
        self._pending = {}
        self._deliveries.count(done.scale.num_samples)
        if received:
            self._add(received, done)
        if self._on_pass is not None:
            self._tell(self._on_pass, done)

    def _received(self) -> dict[str, Tensor]:
        return {name: gradient for part in self._pending.values() for name, gradient in part.items()}

    def _pending_are_finite(self) -> Tensor | None:
        return are_finite(list(received.values())) if (received := self._received()) else None

    def _add(self, received: dict[str, Tensor], done: CountedPass) -> None:
        sums = [self._sums[name] for name in received]
        gradients = [addend(g, s) for g, s in zip(received.values(), sums, strict=True)]
        if done.is_finite is not None:
            gradients = kept(gradients, done.is_finite)
        factor = done.scale.factor
        if isinstance(factor, Tensor):
            self._count_in(factor)
            torch._foreach_add_(sums, gradients)
        elif factor:
            self._multiply_out()
            torch._foreach_add_(sums, gradients, alpha=factor)

    def _tell(self, on_pass: Callable[[PassSums], None], done: CountedPass) -> None:
        self._multiply_out()
        sums = list(self._sums.values())
        norms = torch.stack(torch._foreach_norm(sums)).double()
        on_pass(PassSums(done.sum_of_sq_norms, norms.square().sum(), done.scale.num_samples, done.is_finite))
        torch._foreach_zero_(sums)

    def _count_in(self, unit: Tensor) -> None:
        """Keep the sums as multiples of `unit` from here on, in which gradients are added as they are.

        A compiled pass has its scale on the device, where the product with each gradient would need room; asking for
        that takes a host longer than all the rest.
        """
        if self._unit is None:
            self._unit = torch.ones_like(unit)
        sums = list(self._sums.values())
        torch._foreach_mul_(sums, (self._unit / unit).to(sums[0].dtype))
        self._unit.copy_(unit)

    def _multiply_out(self) -> None:
        """Sums of gradients as they are, for a reader."""
        if self._unit is not None:
            self._count_in(torch.ones_like(self._unit))

    def _check_coverage(self, task: int) -> None:
        """A weight used past its layer's forward would be missing in the norms."""
        if task not in self._pending:
            return
        counted = {id(p) for layer in self.norms._layers_reached(task) for p in layer.parameters}
        received = {name for part in self._pending.values() for name in part}
        missed = [name for name, p in self._parameters.items() if name in received and id(p) not in counted]
        if missed:
            self._pending = {}
            raise not_called(missed)

    def _require_reached(self) -> None:
        """Check the same for shards, whose gradients may come after the pass, when the sums are read."""
        if self._shards is None:
            return
        counted = {id(p) for layer in self.norms._layers if id(layer.module) in self._reached for p in layer.parameters}
        missed = [name for name in sorted(self._shards.received) if id(self._parameters[name]) not in counted]
        if missed:
            raise not_called(missed)

    def _require_can_be_sharded(self) -> None:
        refused = [key for key in ("compiled", "grad_scaler") if self._settings[key]]
        again = [
            f"'{layer.name}' ({type(layer.module).__name__})" for layer in self.norms._layers if layer.entry.reruns
        ]
        if not self.norms._loss_scale.knows_rank_shard:
            refused.append("a meter without a loader")
        if refused or again:
            raise CoverageError(f"parameters sharded by FSDP2 cannot be measured with: {', '.join(refused + again)}")


def gradient_diversity(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    loss_reduction: LossReduction = "mean",
    fallback: Literal["vmap"] | None = None,
    ranks: Ranks | None = None,
    skip_nonfinite: bool = False,
) -> Diversity:
    """Exact gradient diversity of the samples in `batches`, at the model's present weights.

    The model runs in the mode it is in, without its compiled code if it has any, and is left as found: weights,
    gradients, buffers, mode, random state.

    Args:
        model: the model, also within DistributedDataParallel.
        loss_fn: gives the loss of a batch, `loss_fn(model(inputs), targets)`.
        batches: pairs `(inputs, targets)`, as many as you like.
        loss_reduction: how `loss_fn` reduces over the samples of a batch, "mean" or "sum".
        fallback: "vmap" measures layers without a norm rule, as in `NormMeter`.
        ranks: the processes that each bring batches of their own (`loader.full_pass()`): the answer is for all of them.
        skip_nonfinite: whether batches whose gradients are not all finite are left out (`skipped_samples` says how many
            samples that were). Otherwise one of them leaves the diversity undefined.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))]
    >>> gradient_diversity(model, lambda out, _: out.mean(), data)  # gradients 1 and 3: (1 + 9) / (1 + 3)^2
    Diversity(sum_of_sq_norms=10.0, sq_norm_of_sum=16.0, num_samples=2)
    """
    model = uncompiled(inside_ddp(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    meter = DiversityMeter(
        model, ranks=ranks, loss_reduction=loss_reduction, fallback=fallback, skip_nonfinite=skip_nonfinite
    )
    with pausing_meters(), without_weighing(model), _left_as_found(model), torch.enable_grad(), meter:
        for inputs, targets in map(batch_pair, batches):
            # grad() and not backward(): the parameters' own .grad stays untouched.
            torch.autograd.grad(loss_fn(model(inputs), targets), parameters, allow_unused=True)
        if meter.norms.num_samples + meter.norms.skipped_samples == 0:
            raise ArgumentError("gradient_diversity was given no batches")
        return meter.diversity()


def batch_pair(batch: Any) -> tuple[Any, Any]:
    """The batch, if it is a pair."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ArgumentError(f"batches must be pairs (inputs, targets), got {type(batch).__name__}{length}")
    return batch[0], batch[1]


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore buffers (BatchNorm statistics) and the random state (dropout) afterwards."""
    found = [(m, key, b, b.clone()) for m in model.modules() for key, b in m._buffers.items() if b is not None]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, key, buffer, before in found:
                    module._buffers[key] = buffer.copy_(before)
