"""An estimate from the batch gradients alone."""

from divebatch.estimators.comparisons import SuccessiveGradients
from divebatch.estimators.sketch_choice import SketchChoice
from divebatch.estimators.stepwise import Stepwise, require_settings
from divebatch.estimators.successive_steps import SuccessiveSteps


class Moments(Stepwise):
    """Compares gradients of successive steps: what they have in common is signal, the rest noise. No layer is touched.

    Bias: the weights move between steps, and a gradient's noise with them, against which the next gradients point. With
    momentum, products of gradients one and two steps apart show by how much, and are extrapolated to none apart
    (`lagged_products.extrapolation`): what is left is of higher order in the learning rate. On ResNet-18 B came out
    0.76 to 1.13 times what `split` said in epochs 5 to 30 of 40, and several times too large in the first; around a
    minimum 0.7 to 1.5 times what it was. Cost: a few passes over the gradients a step, and three sketches of them
    (`gradient_sketch`), at most 1 % of the parameters' memory together; models below some 6 million parameters are
    rather copied three times. No further backward pass, and no layer needs a rule. Under BatchNorm it is right for the
    network as it trains, normalised over its whole batches.

    Without momentum, or with too little, gradients are compared in pairs. That takes one copy, and the bias stays: a
    step at learning rate lr changes the next gradient by -lr * H g, H the Hessian, so to first order ||G||^2 comes out
    too small by lr * E[g'Hg] and tr(Sigma) too large by lr * tr(H Sigma) with pairs and plain SGD; momentum and larger
    windows add to it. At a high rate successive gradients may even point against each other. How large that bias is
    cannot be told, only that it makes B too large. So the interval goes down to zero, and no policy lets a batch grow
    on it: use `split` or `per-sample`. Where ||G||^2 comes out below zero, nothing is said of the noise scale at all.

    It reads gradients as `optimizer.step()` finds them: clipping before the step is measured with them, a GradScaler's
    scale is undone, and where ranks share a batch they are the whole batch's. Batches whose step was skipped after
    their backward pass are in no estimate; one left out before it would count with the next.

    Under FSDP2 each rank keeps its own shards, and products are added over ranks when they are read. Sketches of
    shards are added over ranks in each step that is looked at, so that every rank has the whole gradient's.

    Args:
        window: compares so many gradients, at least 2, as chunks of one large batch; None extrapolates as above where
            the optimizer's momentum allows it, and else compares pairs.
        decay: below 1 for an exponential mean over estimates; 0.95 looks back some twenty.
        preconditioned: whether to measure gradients as an Adam-like optimizer sees them, each divided by what its own
            step divides by.
        every_steps: makes one estimate in so many steps, or in as few as it takes; the steps in between are not looked
            at and cost next to nothing. With 1 there is one a step where it is extrapolated, else one a window.
        sketch: whether gradients are kept as sketches, whose error is part of the interval, or whole; None for sketches
            where one of 2^14 numbers or more fits into 1 % of the parameters' memory.
        sketch_size: numbers of a sketch; None for the largest power of two that fits, and at most 2^20.
    """

    name = "moments"
    stand_in = "per-sample"
    undoes_grad_scale = True
    has_inner_variance = True
    sees_all_ranks = True
    needs_whole_gradients = False

    def __init__(
        self,
        *,
        window: int | None = None,
        decay: float = 1.0,
        preconditioned: bool = False,
        every_steps: int = 1,
        sketch: bool | None = None,
        sketch_size: int | None = None,
    ) -> None:
        require_settings(preconditioned=preconditioned, every_steps=every_steps)
        way = SuccessiveGradients(self.name, window, preconditioned, SketchChoice(sketch, sketch_size))
        super().__init__(SuccessiveSteps(way, every_steps=every_steps), decay=decay)
