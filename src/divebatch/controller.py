"""The link between a policy and a training loop: observe, estimate, decide, apply, record.

The loader calls `_on_batch` before it fetches a batch. The optimizer's hooks call `_on_step` and `_after_step` around
its step: rates first, then the estimator. The user calls `step` after the epoch. No other part counts batches or steps.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_choice, require_count, require_same, warn_user
from divebatch.data.loader import AdaptiveLoader, warn_if_endless
from divebatch.data.micro_batches import BatchPlan
from divebatch.data.order import EpochProgress
from divebatch.data.source import rank_shard_of
from divebatch.errors import UsageError
from divebatch.estimators import Estimator, require_fit
from divebatch.lr import BY_NOISE, Coupling, Rates, Unit, couplings_of, position_of
from divebatch.measurement import Decision, Diversity, History, Measurement, StepEvent
from divebatch.norms.rank_weighting import weigh_gradients
from divebatch.norms.sharded import local
from divebatch.parts import (
    Cadence,
    as_list,
    require_parts,
    require_same_setup,
    require_step_cadence,
    resolve_estimator,
    training_context,
)
from divebatch.policies import Fixed, Policy
from divebatch.policies.policy import in_multiples, settings_of
from divebatch.records import Change, EpochRecord

STATE_VERSION = 4


class Controller:
    """The link between a policy and a training loop: it sets batch size and learning rate after each epoch.

    Call `step()` once after each epoch, after the scheduler's own step. Only what the policy needs is measured; epochs
    that are not measured run without hooks on the model.

    `group["lr"]` stays the schedule's own rate. During each optimizer step the rate is multiplied by the factor of the
    batch size; `control.lr` and the records give the product.

    Under a process group (`loader.ranks`) all ranks must create a controller and call its methods in the same way. The
    measurement covers all ranks, and all of them take rank 0's decision. Gradients are exact even if ranks hold unequal
    numbers of a batch's samples.

    Args:
        model: The model to train: your own, its DDP wrapper, or one that FSDP2 has sharded.
        optimizer: The torch optimizer that trains the model, or a list of optimizers whose rates all follow.
        loader: The `AdaptiveLoader` whose batch size is set.
        policy: The rule that chooses the batch size, such as `Auto(max_batch_size=4096)`.
        estimator: The estimator: "moments", "split", "per-sample", "ranks", "trajectory" (the paper's) or an object
            such as `Oracle(loss_fn)`. None: the policy's own.
        lr_coupling: How the learning rate follows the batch size: "none"; "linear", "adascale" or "1/(1+B/b)" (SGD);
            "sqrt" or "adascale-sqrt" (Adam-like optimizers); "adam-beta1" (Adam, AdamW, NAdam, Adamax: the root, and
            beta1 follows too) or "adam" (betas, eps and weight decay follow); a number p such as 0.6 for the p-th power
            of the batch size; or a list with one for each optimizer. None: the policy's own, else "none".
        scheduler: The scheduler that drives the optimizer, or a list. Only schedulers that are stepped after every
            optimizer step must be passed.
        scheduler_unit: The unit of a call of `scheduler.step`: an "epoch"; a "step" of the first batch size, counted in
            samples; or a "call", one step of the schedule whatever the batch size. A list: one for each.
        accumulate: The number of the loader's batches in an optimizer step, for a loop that accumulates gradients.
            Policies and records use the size of a step; the loader's is that size over `accumulate`, rounded down.
        base_batch_size: The batch size that your learning rate was chosen for. None: the loader's first.
        loss_reduction: How your loss is reduced over a batch: "mean" or "sum"; "weighted" if your loop itself
            multiplies a mean by `loader.rank_shard.loss_weight`, for ranks with unequal numbers of samples.
        grad_scaler: The `torch.amp.GradScaler` that multiplies the losses. None: there is none.
        shadows: Policies by name that only watch: each epoch's record shows the size that each would have chosen.
        every_steps: Also decide within epochs, after every N optimizer steps. A new size applies to the rest of the
            epoch, in a stream after the batches that its workers hold. None: decide only at the ends of epochs.
        measure_always: Measure every epoch for the record, even if no policy asks for it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: AdaptiveLoader,
        policy: Policy,
        *,
        estimator: str | Estimator | None = None,
        lr_coupling: Coupling | Sequence[Coupling] | None = None,
        scheduler: Any = None,
        scheduler_unit: Unit | Sequence[Unit] = "epoch",
        accumulate: int = 1,
        base_batch_size: int | None = None,
        loss_reduction: str = "mean",
        grad_scaler: Any = None,
        shadows: Mapping[str, Policy] | None = None,
        every_steps: int | None = None,
        measure_always: bool = False,
    ) -> None:
        # Nothing is attached before the last check: a constructor that raises leaves all parts as they were.
        optimizers, self._shadows = as_list(optimizer), dict(shadows or {})
        require_parts(model, optimizers, as_list(scheduler), loader, policy, estimator, self._shadows)
        loader.require_no_controller()
        require_choice("loss_reduction", loss_reduction, ("mean", "sum", "weighted"))
        if base_batch_size is not None:
            require_count("base_batch_size", base_batch_size)
        couplings = couplings_of(policy, lr_coupling, optimizers)
        context = training_context(model, optimizers, loader, "sum" if loss_reduction == "sum" else "mean")
        chosen = resolve_estimator(policy, estimator, context, shadows=self._shadows, grad_scaler=grad_scaler)
        self.policy, self.loader, self.ranks, self._context = policy, loader, loader.ranks, context
        self._cadence = Cadence(loader, accumulate)
        self._unit = self._cadence.unit
        require_same_setup(
            optimizers,
            loader,
            policy=repr(policy),
            shadows=repr(self._shadows),
            estimator=type(chosen).__name__,
            lr_coupling=couplings,
            loss_reduction=loss_reduction,
            every_steps=every_steps,
            accumulate=accumulate,
            base_batch_size=base_batch_size,
            measure_always=measure_always,
            scheduler_unit=scheduler_unit,
        )
        first = min(loader.batch_size, loader.dataset_size or sys.maxsize)  # what a batch really holds
        policy.check_start(first * self._unit)
        policies = [policy, *self._shadows.values()]
        self._asking = [each for each in policies if "diversity" in each.needs]
        self._wants_loss = next((each for each in policies if "loss" in each.needs), None)
        self._wants_speed = any("throughputs" in each.needs for each in policies)
        self._measure_always = measure_always or not BY_NOISE.isdisjoint(couplings)
        self._estimator = chosen if self._asking or self._measure_always else None
        self._every_steps = every_steps
        require_step_cadence(every_steps, policy, self._estimator)
        self._rates = Rates(
            optimizers,
            kinds=couplings,
            loader=loader,
            first_batch_size=first * self._unit,
            schedulers=as_list(scheduler),
            scheduler_unit=scheduler_unit,
            base_batch_size=base_batch_size,
            accumulate=accumulate,
            loss_reduction=loss_reduction,
        )
        self._has_warned_of_caveat = self._has_warned_of_step = self._has_warned_of_break = False
        if self._estimator is not None:
            require_fit(self._estimator, context.model)
            self._warn_of_caveat()
            self._estimator.bind(context)

        self.epoch, self.steps = loader.epoch, loader.batches_delivered // accumulate
        """The number of epochs with a decision, and of optimizer steps so far."""
        self._steps_before = self._steps_decided = self.steps
        """Steps at the end of the last epoch, and at the last decision."""
        self._samples = 0
        """Samples of the epoch delivered up to its last optimizer step."""
        self._leader: Optimizer | None = None
        """The optimizer that stepped first on the latest batch."""
        self._at_work: Estimator | None = None
        """The estimator, while an epoch is measured."""
        self._was_at_work = False
        self._found: Diversity | None = None
        self._most, self._most_is_news = sys.maxsize, False
        """The largest batch that memory allows, in samples."""
        self._history, self._changes = History(), list[Change]()
        self._is_under_way = self._is_closed = self._has_begun = self._has_decided = False
        self._weight = min((p for p in context.model.parameters() if p.requires_grad), key=lambda p: p.numel())
        self._weight_before = self._weight.detach().clone()
        """A small parameter and its value at the epoch's start: a change shows the steps of another optimizer."""
        self._may_capture = any(p.is_cuda for p in context.model.parameters())
        self.then: Callable[[EpochProgress], None] | None = None
        """A function for adapters, called with the current epoch before each batch is fetched, after the controller."""

        loader.batch_size = first
        self._training = {context.require_optimizer("a controller"), *context.other_optimizers}
        self._undo = [loader.observe(self._on_batch)]
        for each in self._rates.couplings:
            # A compiled step runs the hooks as they are. The optimizer has loaded the compiler already.
            self._undo.append(each.register_step_pre_hook(torch.compiler.disable(self._on_step)).remove)
            self._undo.append(each.register_step_post_hook(torch.compiler.disable(self._after_step)).remove)
        if loss_reduction != "weighted" and not loader.ranks.is_alone:
            reduction = context.loss_reduction
            self._undo.append(weigh_gradients(model, lambda: loader.rank_shard.weight_for(reduction)))

    # The loop: a batch is fetched, an optimizer steps, an epoch ends

    def _on_batch(self, current: EpochProgress) -> None:
        """Prepare for the next batch: begin an epoch, or make a decision that is due. The loader calls this."""
        size = current.batch_size * self._unit
        if size != self._rates.batch_size:  # it was set by hand
            self._rates.follow(size, step=self.steps)
            self._note_change(size)
        if self.loader.has_finished_epoch(since=self.epoch):
            if current.batches:  # one batch alone is a look: next(iter(loader))
                self._warn_if_step_is_missing()
        elif current.batches == 0 or not self._is_under_way:
            if current.order is not None:
                self._warn_if_left_early()
            self._begin_epoch()
        elif self._every_steps is None:
            if current.num_batches is None:
                warn_if_endless(current)
        elif self.steps - self._steps_decided >= self._every_steps:
            # Decide only between two steps, never between the batches of one step.
            self._decide_within_epoch(current)
        if self.then is not None:
            self.then(current)

    def _begin_epoch(self) -> None:
        """Begin an epoch, and discard one that was left early. Hooks are put on the model only here."""
        if not self._has_begun:
            self._warn_if_state_is_missing()
        self._changes, self._is_under_way, self._has_begun = [], True, True
        self.steps = self._steps_decided = self._steps_before
        self._samples, self._leader = 0, None
        self._weight_before.copy_(self._weight.detach())
        self._rates.mark()
        self._stop_measuring()
        self._was_at_work = False
        self._measure_if_due()

    def _on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a step that begins, and set its rates. No other hook runs before a step."""
        coupling = self._rates.couplings.get(optimizer)
        if coupling is None:  # a deep copy, which has the hook too
            return None
        if self._may_capture and torch.cuda.is_current_stream_capturing():  # captured, not executed
            return None
        event = self._begin_step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if event is not None:
                self._see_gradients(event, optimizer)
            return None

        def followed() -> Any:
            nonlocal event
            coupling.put_back()  # a closure sees its own rates
            result = closure()
            coupling.look()  # the closure may have written a rate
            coupling.put_in_force()
            if event is not None:
                self._see_gradients(event, optimizer)
            event = None  # line searches call the closure again, at other weights
            return result

        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _see_gradients(self, event: StepEvent, optimizer: Optimizer) -> None:
        if self._rates.may_be_sum is not None:
            self._rates.look_at_gradients(optimizer)
        if self._at_work is not None:
            self._at_work.on_step(event, optimizer)

    def _begin_step(self, optimizer: Optimizer) -> StepEvent | None:
        """Count the step and set its rates; return the event if the optimizer trains the model."""
        coupling, event, number, before = self._rates.couplings[optimizer], None, -1, 0
        if self._is_under_way and optimizer in self._training:
            batches, samples, local_samples = self.loader.since_last_step()
            number, before = self.steps - self._steps_before, self._samples
            size = self._rates.batch_size
            said = self._cadence.accumulate if self.loader.delivery_size is None else self._cadence.said(size)
            event = StepEvent(self.steps, batches, samples, local_samples, size, said)
            self._samples += samples
            if samples or optimizer is self._leader:  # else another optimizer's step on the same samples
                self._leader = optimizer
                if batches == said:
                    self._cadence.agreeing += 1
                elif number == 0 and batches < said and self._has_decided:  # with batches of the last epoch
                    self._rates.carry_over()
                else:
                    self._cadence.check(batches, said)
                self.steps += 1
        self._rates.before_step(coupling, number, before, self._samples)
        return event

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        """Restore the rates. No other hook runs after a step."""
        coupling = self._rates.couplings.get(optimizer)
        if coupling is not None and (coupling.undo or self._rates.schedules):
            self._rates.after_step(coupling, self._samples)

    def step(self, *, loss: float | None = None) -> EpochRecord:
        """Measure the finished epoch, decide, and apply the decision; return the record of both.

        `loss` is the epoch's mean training loss over this rank's samples, or over all. Some policies need the loss, and
        the record shows it.
        """
        if self._is_closed:
            raise UsageError("this controller was closed: step() comes before close()")
        finished = self.loader.finished_epoch(since=self.epoch)
        self._check_steps(finished)
        is_first_size = finished.batch_size * self._unit == self._rates.first_batch_size and not self._changes
        self._rates.end_epoch(self.steps - self._steps_before, finished.batches, is_first_size=is_first_size)
        if not self.ranks.is_alone:
            loss = self.ranks.mean(loss, finished.local_samples if loss is not None else 0)
        if loss is None and self._wants_loss is not None:
            raise UsageError(f"{self._wants_loss} needs the epoch's mean training loss: control.step(loss=...)")
        history = self._history
        if self._wants_speed and (speed := finished.samples_per_second) is not None:
            history = history.with_throughput(finished.batch_size * self._unit, speed)

        seen = self._measurement(finished, self._end_of_epoch(), lr=self._rates.epoch_lr, loss=loss)
        seen, decision = self._agreed(replace(seen, history=history.with_epoch(seen)))
        shadows = {name: self._decided(policy, seen).batch_size for name, policy in self._shadows.items()}
        is_at_rest = self._estimator is not None and self._estimator.at_fixed_weights
        measured = {} if seen.diversity is None else seen.diversity.in_record(at_fixed_weights=is_at_rest)
        # The epoch counts as over only from here on: after an error above, step() can be called again.
        self.loader.batch_size = decision.batch_size // self._unit
        self._follow(seen, decision)
        record = EpochRecord(
            epoch=seen.epoch,
            batch_size=seen.batch_size,
            lr=self._rates.epoch_lr,
            steps=self.steps,
            samples=seen.samples,
            train_loss=None if loss is None else float(loss),
            next_batch_size=decision.batch_size,
            next_lr=self._rates.first.lr,
            lr_owed=decision.lr_owed if decision.lr_owed != 1.0 else None,
            reason=decision.reason,
            shadows=shadows or None,
            changes=self._changes or None,
            measured=self._was_at_work if self._estimator is not None else None,
            micro_batch_size=finished.batch_size if self._unit > 1 else None,
            **measured,
        )
        self.epoch, self._steps_before = self.epoch + 1, self.steps
        self._found, self._changes, self._most_is_news = None, [], False
        self._is_under_way, self._has_decided = False, True
        return record

    def _decide_within_epoch(self, current: EpochProgress) -> None:
        self._rates.catch_up(self._samples)
        lr = self._rates.first.lr
        seen = self._measurement(current, self._at_work.window() if self._at_work is not None else None, lr=lr)
        seen, decision = self._agreed(replace(seen, history=self._history.with_steps(seen)))
        self.loader.resize_now(decision.batch_size // self._unit)
        self._follow(seen, decision)
        self._measure_if_due()
        if decision.batch_size != seen.batch_size or not math.isclose(self._rates.first.lr, lr):
            self._note_change(decision.batch_size)

    # What a user reads and calls

    @property
    def lr(self) -> float:
        """The learning rate of the next step: the first group's own rate times the factor of the batch size."""
        return self._rates.first.lr

    @property
    def first_batch_size(self) -> int:
        """The batch size that training began with."""
        return self._rates.first_batch_size

    @property
    def effective_steps(self) -> float:
        """The steps so far, counted in steps at the base batch size: the sum of AdaScale's gains.

        With any other coupling each step counts as one.
        """
        return self._rates.gains.at(self.steps)

    def take_scheduler_steps(self) -> int:
        """Return the number of steps that a scheduler stepped with every batch must make to reach `effective_steps`.

        Each call returns the steps that became due since the last call, so a second call returns 0.
        """
        return self._rates.take_scheduler_steps(self.steps)

    def limit_batch_size(self, most: int) -> None:
        """Limit all batches to `most` samples: cut the rest of the epoch accordingly, and cap later decisions.

        Call this if a step ran out of memory, before the step is repeated in parts. The epoch's measurements so far are
        discarded, since the failed pass is half counted.
        """
        require_count("most", most)
        self._most, self._most_is_news = most, True
        self._stop_measuring()
        if self.loader.batch_size * self._unit > most:
            self.loader.resize_now(max(1, most // self._unit))

    def plan(self) -> BatchPlan:
        """Return instructions for the batch delivered last. Call this once a batch, before its forward pass."""
        full, shard = rank_shard_of(self.loader.batch_size, self.ranks).mine, self.loader.rank_shard
        if self._at_work is None:
            return BatchPlan(batch_size=full, rank_shard=shard)
        return BatchPlan(
            batch_size=full,
            rank_shard=shard,
            measuring=True,
            min_micro_batches=self._at_work.min_micro_batches,
            replay_token=self._at_work.replay_token,
            see_replay=self._at_work.see_replay,
        )

    @contextmanager
    def around_step(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Do the work of the optimizer's hooks around a step that runs no hooks.

        Use this for a CUDA graph that holds the optimizer's step: `with control.around_step(): graph.replay()`. The
        rates must be tensors (`capturable=True`), which are changed in place.

        Args:
            optimizer: The optimizer that is replayed. None: the first one.
        """
        optimizer = optimizer or next(iter(self._rates.couplings))
        coupling, event = self._rates.couplings[optimizer], self._begin_step(optimizer)
        try:
            yield
            if event is not None and self._at_work is not None:
                self._at_work.on_step(event, optimizer)  # the replay's gradients exist only now
        finally:
            self._rates.after_step(coupling, self._samples)

    def close(self) -> None:
        """Detach everything from model, loader and optimizers; the batch size stays as it is."""
        if not (self._is_closed or self._has_decided or self._has_warned_of_step):
            self._warn_if_step_is_missing()
        self._detach()

    def _detach(self) -> None:
        if self._is_under_way and not self._is_closed:
            self._rates.catch_up(self._samples)  # training ends within an epoch
        self._is_closed = True
        while self._undo:
            self._undo.pop()()
        for coupling in self._rates.couplings.values():
            coupling.put_back()
        self._stop_measuring()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._detach()

    # Checks of the arguments against the loop

    def _check_steps(self, finished: EpochProgress) -> None:
        """Check the steps of an epoch that has ended."""
        self._cadence.end_epoch(finished.batch_size)
        if self.steps > self._steps_before:
            return
        seen = f"no step of {', '.join(type(each).__name__ for each in self._rates.couplings)} was seen in it"
        # NaN is not equal to itself, and a GradScaler skips every step once weights are NaN.
        now, before = (torch.nan_to_num(local(each)) for each in (self._weight, self._weight_before))
        if not torch.equal(now, before):
            raise UsageError(
                f"epoch {finished.epoch + 1} has ended and the weights have changed, but {seen}: pass the optimizer "
                f"that steps, and make a new Controller if you made a new optimizer. Replay a CUDA graph that holds "
                f"the optimizer's step inside `with control.around_step():`"
            )
        if self._every_steps is not None:
            raise UsageError(f"every_steps={self._every_steps} counts steps of the optimizer, and {seen}")
        warn_user(
            f"epoch {finished.epoch + 1} has ended, {seen}, and the weights are as they were: a GradScaler has skipped "
            f"every step, or another model is trained: then pass that one, with its optimizer"
        )
        self.steps += max(1, finished.batches // self._cadence.said(finished.batch_size))

    def _warn_if_step_is_missing(self) -> None:
        if not self._has_warned_of_step and self.loader.has_finished_epoch(since=self.epoch):
            self._has_warned_of_step = True
            warn_user(
                f"epoch {self.epoch + 1} has ended without a call of control.step(), so nothing was decided: call it "
                f"once after each epoch. For a complete pass without training use loader.full_pass()"
            )

    def _warn_if_left_early(self) -> None:
        steps = self.steps - self._steps_before
        if self._is_under_way and steps and not self._has_warned_of_break:
            self._has_warned_of_break = True
            warn_user(
                f"epoch {self.epoch + 1} was left after {steps} optimizer steps, and begins again with the same "
                f"samples: for shorter epochs, each on other samples, leave the break out and pass "
                f"AdaptiveLoader(..., epoch_samples=N)"
            )

    def _warn_if_state_is_missing(self) -> None:
        is_begun = any(position_of(each.scheduler) > 0 for each in self._rates.schedules) or any(
            float(state.get("step", 1)) > 0 for each in self._rates.couplings for state in each.state.values()
        )
        if is_begun and not isinstance(self.policy, Fixed):
            warn_user(
                f"the optimizer has made steps before, and this controller begins anew, with a batch of "
                f"{self._rates.batch_size} samples: to continue a training, save control.state_dict() with the rest, "
                f"and restore it with control.load_state_dict(checkpoint['control'])"
            )

    # Measuring

    def _measure_if_due(self) -> None:
        """Start, continue or stop measuring, as policies ask; their answer may change with the size within an epoch."""
        if self._estimator is None:
            return
        epoch, size = self.epoch + 1, self._rates.batch_size
        # A monotone policy at its cap has nothing left to decide and asks for no measurement.
        if not (self._measure_always or any(policy.measures(epoch, size) for policy in self._asking)):
            self._stop_measuring()
            return
        if self._at_work is None:
            self._start_measuring()
        self._warn_of_caveat()  # the optimizer's settings may have changed since the beginning

    def _start_measuring(self) -> None:
        assert self._estimator is not None
        self._estimator.start()
        self._at_work, self._was_at_work = self._estimator, True

    def _stop_measuring(self) -> None:
        if self._at_work is not None:
            self._at_work.close()
        self._at_work = None

    def _end_of_epoch(self) -> Diversity | None:
        """Return the epoch's diversity and detach the estimator; a second call after an error returns the same."""
        if self._at_work is not None:
            # Not at the end of the iterator: frameworks that prefetch reach that before the last backward passes.
            found = self._found = self._at_work.finish()
            self._at_work = None
            if found is not None and found.has_diverged:
                seen = f"{found.skipped_samples} of {found.num_samples + found.skipped_samples} samples"
                warn_user(f"{seen} were in no step with finite gradients: training has probably diverged")
        return self._found

    def _warn_of_caveat(self) -> None:
        if self._estimator is None or self._has_warned_of_caveat or self.policy not in self._asking:
            return
        couplings = self._rates.couplings.values()
        for coupling in couplings:
            coupling.put_in_force()  # the caveat depends on the momentum that steps use
        caveat = self._estimator.caveat(self._context)
        for coupling in couplings:
            coupling.put_back()
        if caveat:
            self._has_warned_of_caveat = True
            warn_user(f"{type(self.policy).__name__} cannot grow the batch: {caveat}")

    # Deciding

    def _measurement(
        self, done: EpochProgress, diversity: Diversity | None, *, lr: float, loss: float | None = None
    ) -> Measurement:
        dataset_size = self.loader.dataset_size
        return Measurement(
            epoch=done.epoch + 1,
            batch_size=done.batch_size * self._unit,
            dataset_size=dataset_size,
            first_batch_size=self._rates.first_batch_size,
            step=self.steps,
            samples=self.loader.samples_delivered,
            # A window, or an epoch that dropped its rest, has fewer samples: rescaling leaves n * diversity as it is.
            diversity=diversity if diversity is None or dataset_size is None else diversity.of(dataset_size),
            lr=lr,
            lr_schedule_ratio=self._rates.schedule_ratio(),
            lr_growth=self._rates.growth,
            lr_coupling=self._rates.first.kind,
            loss=loss,
        )

    def _agreed(self, seen: Measurement) -> tuple[Measurement, Decision]:
        """Return rank 0's view and decision: rounding and clocks differ between ranks, decisions must not."""
        agreed: tuple[Measurement, Decision] = self.ranks.from_first((seen, self._decided(self.policy, seen)))
        return agreed

    def _decided(self, policy: Policy, seen: Measurement) -> Decision:
        """Return the policy's decision, limited by dataset, memory, ranks and estimator."""
        most = sys.maxsize if seen.dataset_size is None else seen.dataset_size
        needed = 1 if self._estimator is None else self._estimator.min_batch_size
        least = min(max(self.ranks.size, needed), most)
        decision = in_multiples(policy, seen, self._unit, at_most=most, at_least=least)
        if decision.batch_size <= self._most and not self._most_is_news:
            return decision
        reason = f"{decision.reason}; at most {self._most}: larger batches did not fit into memory".lstrip("; ")
        return replace(decision, batch_size=min(decision.batch_size, self._most), reason=reason)

    def _follow(self, seen: Measurement, decision: Decision) -> None:
        """Make rates and history follow a decision that the loader has adopted."""
        self._rates.follow_decision(decision, seen)
        self._history = seen.history.with_decision(seen.batch_size, decision)
        self._steps_decided = self.steps

    def _note_change(self, batch_size: int) -> None:
        self._rates.mark()
        self._changes.append(Change(self.steps, batch_size, self._rates.first.lr))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return all state but that of model, optimizer and scheduler, as plain containers and tensors.

        All ranks must call this and get the same state, which any number of ranks can load. Only sums and gradients
        that FSDP2 sharded stay in shards (DTensors).
        """
        if self.loader.has_finished_epoch(since=self.epoch):
            raise UsageError("an epoch has ended and its step() is still to come: call step() before saving")
        return {
            "version": STATE_VERSION,
            "settings": self._settings(),
            "epoch": self.epoch,
            "loader": self.loader.state_dict(),
            "estimator": self._estimator.state_dict() if self._estimator is not None else {},
            "is_at_work": self._at_work is not None,
            "was_at_work": self._was_at_work,
            "steps": [self.steps, self._steps_before, self._steps_decided],
            "rates": self._rates.state_dict(),
            "history": asdict(self._history),
            "most": [self._most, self._most_is_news],
            "changes": [list(change) for change in self._changes],
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the saved one."""
        parameters = self._context.model.named_parameters()
        return {
            "policy": settings_of(self.policy),
            "estimator": type(self._estimator).__name__,
            "every_steps": self._every_steps,
            "accumulate": self._cadence.accumulate,
            "parameters": {name.replace("_orig_mod.", ""): list(each.shape) for name, each in parameters},
            **self._rates.settings(),
        }

    def require_fits(self, place: str, state: dict[str, Any]) -> None:
        """Raise if a saved state belongs to another run; `place` names the state in the error."""
        for name, mine in (("version", STATE_VERSION), ("settings", self._settings())):
            require_same(f"{place}.{name}", state.get(name), mine)
        self.loader.require_same_data(state["loader"], f"{place}.loader")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved controller stood. A state that does not fit changes nothing."""
        # All checks come before the first change, so that a state that does not fit leaves everything as it was.
        self.require_fits("control", state)
        self.loader.load_state_dict(state["loader"])
        self._rates.load_state_dict(state["rates"])
        self.epoch, self._history = state["epoch"], History.from_dict(state["history"])
        self.steps, self._steps_before, self._steps_decided = state["steps"][:3]
        self._changes, (self._most, self._most_is_news) = [Change(*each) for each in state["changes"]], state["most"]
        current = self.loader.current
        self._is_under_way, self._samples = current is not None, 0 if current is None else current.samples
        self._has_begun, self._leader = True, None
        self._weight_before.copy_(self._weight.detach())
        self._stop_measuring()
        # Restore what was saved, not what policies ask for now: measuring may have stopped within the epoch.
        if self._is_under_way and state["is_at_work"] and self._estimator is not None:
            self._start_measuring()
            self._estimator.load_state_dict(state["estimator"])
        self._was_at_work = state["was_at_work"]
