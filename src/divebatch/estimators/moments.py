"""An estimate from the gradients of successive optimizer steps."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators.average import AveragedEstimator, Norms, PairAverage, StepEstimate, inner_variance, read
from divebatch.estimators.estimator import TrainingContext
from divebatch.estimators.per_sample import PerSample, suits_per_sample
from divebatch.estimators.second_moment import Preconditioner, StepGradients, require_second_moment
from divebatch.estimators.sketch import LEAST_SIZE, KernelSketch, SignSketch, applies, fitting_size
from divebatch.estimators.step_hooks import UnchangedGradients, scale_of_gradients
from divebatch.measurement import StepEvent
from divebatch.norms.accumulators import trainable
from divebatch.norms.sharded import Shards
from divebatch.norms.sketch import sum_dtype

KEPT = 3
"""The number of steps whose gradients are kept, including the newest."""
FARTHEST = 2.5
"""The largest factor of the extrapolation, which also multiplies the products' noise."""
LONGEST_DOT = 2**24
"""The most entries in one product: on a CPU in float32, 10^8 gave 0.3 to 0.8 % too little, 2^24 gave 0.02 %."""


def extrapolation(optimizer: Optimizer) -> float:
    """Return f in ||G||^2 = L1 + f * (L1 - L2), where L1 and L2 are products of gradients one and two steps apart.

    A gradient's noise moves the weights, so that the following gradients point against it: by c after one step and with
    momentum m by (1 + m) c after two; Nesterov's (1 + m) c and (1 + m + m^2) c. So f is 1 / m, or (1 + m) / m^2. If f
    exceeds 2.5 (momentum below 0.4, Nesterov's below 0.87), the result is 0, and only L1 counts. The same holds for
    NAdam, whose momentum rises over thousands of steps. The momentum is that of the largest parameter group.
    """
    return _factor(optimizer.param_groups[_largest_group(optimizer)])


def _largest_group(optimizer: Optimizer) -> int:
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return sizes.index(max(sizes))


def _factor(group: Mapping[str, Any]) -> float:
    momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
    if momentum <= 0 or "momentum_decay" in group:
        return 0.0
    factor = (1 + momentum) / momentum**2 if group.get("nesterov") else 1 / momentum
    return factor if factor <= FARTHEST else 0.0


def _numbers(values: Sequence[float], *, sizes: tuple[int, int], factor: float) -> tuple[float, ...]:
    """Return weight, tr(Sigma), ||G||^2, Var_i<g_i, g>, and the part of tr(Sigma) that falls with ||G||^2.

    Args:
        values: ||g||^2 of the previous step and of this one; this gradient's products with the two before.
        sizes: Samples of the previous step and of this one.
        factor: The factor of the extrapolation.
    """
    (size, own_size), (before, own, one, two) = sizes, values
    sq_norm = one + factor * (one - two)
    mean = (size**2 * before + 2 * size * own_size * one + own_size**2 * own) / (size + own_size) ** 2
    inner = inner_variance((before, own), sizes, mean)
    return own_size, own_size * (own - sq_norm), sq_norm, inner, own_size * sq_norm


class SuccessiveGradients:
    """The gradients of the last three steps, whole or as sketches, compared with each other.

    The gradients are whole, or this rank's shards of them, or sketches. Squared norms are exact in all cases. Products
    of sketches have random errors, which the scatter shows, except for the error of ||G||^2 itself. If ranks hold
    shards, products of shards add up over ranks, but sketches are added at each step.

    Args:
        parameters: The parameters whose gradients are compared, by name.
        optimizer: The optimizer whose momentum counts.
        average: The mean that receives an estimate at each step, or every `every_steps`.
        preconditioned: Whether gradients are divided by the divisor of their own step.
        every_steps: The number of steps from one estimate to the next, or the smallest that works.
        sketch: Whether to keep sketches. None: sketches for large models.
        sketch_size: The number of entries in a sketch. None: as many as fit.
        seed: The seed of the sketches' signs; the same on all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        average: PairAverage,
        *,
        preconditioned: bool = False,
        every_steps: int = 1,
        sketch: bool | None = None,
        sketch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self._parameters, self._optimizer, self._average = parameters, optimizer, average
        self._group, self._every_steps = _largest_group(optimizer), every_steps
        self._preconditioner = Preconditioner(optimizer, parameters) if preconditioned else None
        self._shards = Shards(parameters)
        average.shards = self._shards.ranks
        # Estimates of neighbouring steps share gradients.
        average.overlap = KEPT - 1 if every_steps == 1 else 0
        # Too little momentum leaves an unknown upward bias.
        average.bounds_below = extrapolation(optimizer) > 0
        self._make_room(_size_of_sketch(parameters, sketch, sketch_size), seed)
        self.pause = 0
        """The number of coming steps to skip."""

    def _make_room(self, size: int, seed: int) -> None:
        """Allocate the gradients: sketches of this size, or whole gradients if it is 0."""
        self.signs = SignSketch(self._parameters, size, seed=seed) if size else None
        self.vectors: list[Tensor] = []
        self.views: list[dict[str, Tensor]] = []
        """The parameters' places in the whole vectors."""
        if self.signs is not None:
            self._kernel = KernelSketch(self.signs)
            like = torch.zeros(size, dtype=self.signs.dtype, device=self.signs.device)
            self.vectors = [torch.zeros_like(like) for _ in range(KEPT)]
            self._average.relative_variance = self.signs.relative_variance
        else:
            for _ in range(KEPT):
                vector, views = _flat(self._shards.of(self._parameters))
                self.vectors.append(vector)
                self.views.append(views)
            self._average.relative_variance = 0.0
        self.forget()

    def forget(self) -> None:
        """Drop all steps."""
        self._count = 0
        self._sizes: list[int] = []
        """Samples of the last steps, newest first; the same order holds below."""
        self._sq_norms: list[Norms] = []

    def add(self, optimizer: Optimizer, num_samples: int, *, scale: float = 1.0) -> bool:
        """Take in the step that `optimizer` is about to make; return whether the step counts.

        Args:
            optimizer: The optimizer that steps.
            num_samples: Samples of the step.
            scale: The factor that turns the gradients into means over samples.
        """
        average = self._average
        if self.pause:
            self.pause -= 1
            average.num_samples = average.num_samples + num_samples
            return True
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not gradients:
            return False
        grad_scale = scale_of_gradients(optimizer)
        if math.isinf(grad_scale):  # a GradScaler's overflow: the optimizer will skip this step
            average.skipped_samples = average.skipped_samples + num_samples
            return False
        average.num_samples = average.num_samples + num_samples
        if self._shards.is_any_sharded:
            gradients = self._shards.of(gradients)
        settings: dict[str, Any] = {"preconditioner": self._preconditioner, "offsets": self._shards.offsets}
        step = StepGradients(gradients, scale=scale, grad_scale=grad_scale, **settings)
        if not step.gradients:  # an optimizer has no divisor before its first step
            return True
        self.add_gradients(step, num_samples)
        # Momentum may change: OneCycleLR changes it, and lr_coupling="adam" changes it with the batch size.
        factor = _factor(self._optimizer.param_groups[self._group])
        needed = KEPT if factor else KEPT - 1
        if self._count < needed:
            return True
        if not factor:
            average.bounds_below = False
        average.add_step(self.products(factor))
        if self._every_steps > 1:
            self.pause = max(0, self._every_steps - needed)
            self.forget()
        return True

    def add_gradients(self, step: StepGradients, num_samples: int) -> None:
        """Replace the oldest gradients by those of a new step."""
        place = self._count % KEPT
        sq_norm: Norms
        if self.signs is None:
            sq_norm = self._put_whole(place, step)
        else:
            taken = self._kernel if applies(self.signs, step) else self.signs
            self.vectors[place], sq_norm = taken.of(step)
            # Products of sums over ranks need the sums themselves, so each step adds one sketch over ranks.
            self._shards.ranks.sum_([self.vectors[place]])
        self._count += 1
        self._sizes = [num_samples, *self._sizes[: KEPT - 1]]
        self._sq_norms = [sq_norm, *self._sq_norms[: KEPT - 1]]

    def _put_whole(self, place: int, step: StepGradients) -> Tensor:
        vector, views = self.vectors[place], self.views[place]
        gradients = step.gradients if step.moments is None else dict(step)
        if len(gradients) < len(views):
            vector.zero_()
        # In the order of the parameters, like the views.
        places = list(views.values()) if len(gradients) == len(views) else [views[name] for name in gradients]
        with torch.no_grad():
            torch._foreach_copy_(places, [g.to_dense() if g.is_sparse else g for g in gradients.values()])
        if step.scale != 1.0:
            vector.mul_(step.scale)
        return _dot(vector, vector)

    def products(self, factor: float) -> StepEstimate:
        """Multiply the newest gradient with the previous one and, to extrapolate, with the one before that."""
        newest, last = self.vectors[(self._count - 1) % KEPT], self.vectors[(self._count - 2) % KEPT]
        products: list[Norms] = [_dot(newest, last), 0.0]
        if factor:
            products[1] = _dot(newest, self.vectors[self._count % KEPT])
        if self.signs is not None and not self._shards.ranks.is_alone:  # all have whole sketches, so each adds a part
            products = [each / self._shards.ranks.size for each in products]
        numbers = functools.partial(_numbers, sizes=(self._sizes[1], self._sizes[0]), factor=factor)
        return StepEstimate((self._sq_norms[1], self._sq_norms[0], *products), numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that the next steps need, and the signs of their sketches."""
        # The next step replaces the oldest of the three, so two are enough.
        held = [(self._count - lag) % KEPT for lag in range(1, min(self._count, KEPT - 1) + 1)]
        return {
            "sketch": None if self.signs is None else {"size": self.signs.size, "seed": self.signs.seed},
            "entries": {name: p.numel() for name, p in self._parameters.items()},
            "sizes": self._sizes[: len(held)],
            "sq_norms": self._shards.ranks.sum_numbers(read(self._sq_norms[: len(held)])),
            "gradients": [
                self._shards.save(self.views[place]) if self.signs is None else self.vectors[place].clone()
                for place in held
            ],
            "pause": self.pause,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved gradients in their saved form, whatever the settings are here."""
        for was, now in itertools.zip_longest(state["entries"].items(), self._parameters.items()):
            if was is None or now is None or was != (now[0], now[1].numel()):
                here = now and (now[0], now[1].numel())
                raise CheckpointError(
                    f"the checkpoint's gradients are another model's: {was} is there where {here} is here"
                )
        saved = state["sketch"] or {"size": 0, "seed": 0}
        self._make_room(saved["size"], saved["seed"])
        for gradients in reversed(state["gradients"]):
            if self.signs is not None:
                self.vectors[self._count].copy_(gradients)
            else:
                for name, gradient in self._shards.load(gradients).items():
                    self.views[self._count][name].copy_(gradient)
            self._count += 1
        self._sizes = list(state["sizes"])
        # The saved gradients are sums over ranks, so only the first rank takes them over.
        self._sq_norms = [each if self._shards.ranks.is_first else 0.0 for each in state["sq_norms"]]
        self.pause = state["pause"]


def _size_of_sketch(parameters: Mapping[str, nn.Parameter], sketch: bool | None, size: int | None) -> int:
    """Return the number of entries in a sketch; 0 for whole gradients."""
    if sketch is False or size is not None:
        return size or 0
    fitting = fitting_size(list(parameters.values()), sketches=KEPT)
    if fitting >= LEAST_SIZE:
        return fitting
    return LEAST_SIZE if sketch else 0


def _flat(parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a vector with room for all parameters, and each one's strided place in it: all are copied at once."""
    first = next(iter(parameters.values()))
    dtype = functools.reduce(torch.promote_types, (sum_dtype(p.dtype) for p in parameters.values()))
    vector = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=dtype, device=first.device)
    parts = vector.split([p.numel() for p in parameters.values()])
    strides = {name: torch.empty_like(p, device="meta").stride() for name, p in parameters.items()}
    places = zip(parameters.items(), parts, strict=True)
    return vector, {name: part.as_strided(p.shape, strides[name]) for (name, p), part in places}


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Multiply two vectors; return the real part if they are complex."""
    if one.numel() <= LONGEST_DOT:
        return torch.vdot(one, other).real
    # In parts: a long float32 product on a CPU comes out too small (see LONGEST_DOT).
    parts = zip(one.split(LONGEST_DOT), other.split(LONGEST_DOT), strict=True)
    first, *rest = (torch.vdot(*each).real for each in parts)
    return sum(rest, first)


def require_settings(preconditioned: bool, sketch: bool | None, sketch_size: int | None) -> None:
    """Raise for settings of `Moments` that contradict each other."""
    require_choice("preconditioned", preconditioned, (True, False))
    require_choice("sketch", sketch, (None, True, False))
    if sketch_size is not None:
        require_count("sketch_size", sketch_size)
        if sketch is False:
            raise ArgumentError(f"sketch=False keeps whole gradients: leave sketch_size={sketch_size} out")


class Moments(AveragedEstimator):
    """An estimator that compares the gradients of successive steps: their common part is signal, the rest noise.

    Bias: a gradient's noise moves the weights, and the next gradients point against it. With momentum, products of
    gradients one and two steps apart show the size of this effect, which `extrapolation` removes. The remaining bias is
    of higher order in the learning rate, and small except in the first epochs.

    Cost: a few passes over the gradients in each step, and three sketches (`sketch.py`), together at most 1 % of the
    parameters' memory. Models below some 6 million parameters are copied three times instead. There is no further
    backward pass, and no layer needs a rule. With BatchNorm the estimate is right for the network as it trains,
    normalised over its whole batches.

    If momentum is too low, only gradients one step apart are compared, and the bias stays. A step at learning rate lr
    changes the next gradient by -lr * H g, where H is the Hessian. To first order ||G||^2 is then too small by
    lr * E[g'Hg], and B is too large by an unknown amount. So the interval begins at zero, and no policy grows the
    batch: use `split` or `per-sample`. If ||G||^2 comes out negative, the interval is unbounded.

    Gradients are read as `optimizer.step()` finds them: after clipping, without a GradScaler's scale, and of the whole
    batch if ranks share it. Batches without a step are in no estimate. Under FSDP2 each rank keeps its own shards.

    Args:
        decay: Below 1 for an exponential mean over estimates; 0.95 looks back some twenty.
        preconditioned: Whether to measure gradients as an Adam-like optimizer sees them, divided by the divisor of
            their own step.
        every_steps: Make one estimate every N steps, or at the smallest interval that works; other steps cost little.
        sketch: Whether to keep gradients as sketches, whose error is part of the interval, or whole. None: sketches if
            one of 2^14 numbers or more fits into 1 % of the parameters' memory.
        sketch_size: The number of entries in a sketch. None: the largest power of two that fits, at most 2^20.
    """

    name = "moments"
    has_inner_variance = True
    sees_all_ranks = True
    works_on_shards = True
    trusts_negative = False  # the weights move between the compared steps, and this bias can make ||G||^2 negative
    nothing_seen = "the epoch has ended, but no optimizer step on a batch of the loader was seen in it"
    may_see_nothing = True  # with large batches an epoch has only a step or two

    def __init__(
        self,
        *,
        decay: float = 1.0,
        preconditioned: bool = False,
        every_steps: int = 1,
        sketch: bool | None = None,
        sketch_size: int | None = None,
    ) -> None:
        super().__init__(decay=decay, every_steps=every_steps)
        require_settings(preconditioned, sketch, sketch_size)
        self._preconditioned, self._sketch, self._sketch_size = preconditioned, sketch, sketch_size

    def _prepare(self, context: TrainingContext) -> None:
        optimizer = context.require_optimizer(self.name)
        if self._preconditioned:
            require_second_moment(context.require_one_optimizer("preconditioned=True", self.name))
        self._unchanged = UnchangedGradients([optimizer, *context.other_optimizers])

    def caveat(self, context: TrainingContext) -> str:
        if extrapolation(context.require_optimizer(self.name)):
            return ""
        return (
            f"without momentum (at least 0.4, which lr_coupling='adam' may have lowered) {self.name!r} finds no lower "
            "bound of the noise scale. Use a momentum such as 0.9, estimator='split' with micro_batches, or, without "
            "BatchNorm, estimator='per-sample'"
        )

    def stand_in(self, context: TrainingContext, batch_size: int) -> str:
        return PerSample.name if self.caveat(context) and suits_per_sample(context, batch_size) else ""

    @property
    def replay_token(self) -> object:
        return True  # no backward pass needs to be observed

    def _attach(self, context: TrainingContext, average: PairAverage) -> None:
        self._history = SuccessiveGradients(
            trainable(context.model),
            context.require_optimizer(self.name),
            average,
            preconditioned=self._preconditioned,
            every_steps=self._every_steps,
            sketch=self._sketch,
            sketch_size=self._sketch_size,
            # All ranks have seen the same samples, so their signs agree, and each epoch has other signs.
            seed=context.loader.samples_delivered,
        )
        self._is_first = True

    def _detach(self) -> None:
        del self._history

    def on_step(self, event: StepEvent, optimizer: Optimizer) -> None:
        if not event.samples:
            self._unchanged.later(optimizer)
            return
        context, size = self.context, event.samples
        if event.batches > event.accumulate:
            size = self._used(event)
            # A prefetching loader has delivered an additional batch at the first step; no batch was left out there.
            if not self._is_first:
                average = self._at_work()
                average.skipped_samples = average.skipped_samples + event.samples - size
        self._is_first = False
        # The mean over ranks of sums over their samples is the whole sum over the number of ranks.
        scale = 1.0 if context.loss_reduction == "mean" else context.loader.ranks.size / size
        self._history.add(optimizer, size, scale=scale)
        if context.other_optimizers:
            self._unchanged.first(optimizer)

    def _used(self, event: StepEvent) -> int:
        """Return the number of samples in a step's gradient; no step was made on the batches before."""
        last = self.context.loader.rank_shard.num_samples
        earlier = (event.samples - last) / (event.batches - 1)
        return last + round(earlier * ((event.batches - 1) % event.accumulate))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._history.state_dict()} if self._average is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._history.load_state_dict(state)
