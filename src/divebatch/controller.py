"""The one loop a user drives: observe, estimate, decide, apply, record."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_choice, require_count
from divebatch.data.loader import AdaptiveLoader, warn_if_endless
from divebatch.data.micro_batches import BatchPlan
from divebatch.data.order import EpochProgress
from divebatch.data.source import rank_shard_of
from divebatch.errors import UsageError
from divebatch.estimators import Estimator
from divebatch.finished_epoch import finished_epoch, loss_of_all_ranks
from divebatch.lr import BY_NOISE, Coupling, Rates, Reading, ScheduleIn
from divebatch.measurement import Decision, Diversity, History, Measurement
from divebatch.measuring import Measuring
from divebatch.norms.loss_scale import LossReduction
from divebatch.norms.rank_weighting import weigh_gradients
from divebatch.policies import Policy
from divebatch.policies.policy import settings_of
from divebatch.recording import epoch_record
from divebatch.records import Change, EpochRecord
from divebatch.resolve import (
    Trained,
    as_list,
    require_parts,
    require_same_setup,
    require_step_cadence,
    resolve_couplings,
    resolve_estimator,
)
from divebatch.size_limit import SizeLimit
from divebatch.state_checks import require_same
from divebatch.step_count import StepCount, in_multiples

STATE_VERSION = 2


class Controller:
    """Lets a policy set the loader's batch size after each epoch, and the learning rate follow it.

    Call `step()` once after each epoch, after the scheduler's own step. What the policy does not need is not
    measured: an epoch without measuring runs without any hook on the model.

    Under a process group (`loader.ranks`) all ranks make a controller alike and call its methods alike. What is
    measured is that of all ranks, and all take rank 0's view of it, so that they decide the same. Gradients are exact
    although ranks may hold unequal numbers of a batch's samples.

    Args:
        model: The model that is trained: yours, the DDP wrapper around it, or sharded by FSDP2.
        optimizer: The torch optimizer that trains it, or a list of all whose rates shall follow.
        loader: The `AdaptiveLoader` whose batch size is set.
        policy: The rule that sets it, such as `Auto(max_batch_size=4096)`.
        estimator: What measures the gradients: "moments", "split", "per-sample", "ranks", "trajectory" (the paper's) or
            an object such as `Oracle(loss_fn)`. None for the policy's own.
        lr_coupling: How the learning rate follows the batch size: "none"; "linear", "adascale" or "1/(1+B/b)" (SGD);
            "sqrt" or "adascale-sqrt" (Adam-like optimizers); "adam" (Adam, AdamW, NAdam, Adamax: betas, eps and weight
            decay follow too); a number p such as 0.6 for the p-th power of the batch size; or a list with one for each
            optimizer. None for the policy's own, "none" where it has none.
        scheduler: The scheduler that drives the optimizer, or a list of all that do.
        schedule_in: What a call of `scheduler.step` stands for: "steps" of the first batch size, which samples then
            count; "epochs" or just "calls", where each is one step of the schedule. None to tell by when calls come.
        hand_set_lr: What a rate means that your loop writes into a parameter group: the schedule's "own", which the
            batch size's factor multiplies, or the one "in force". None to tell by how it goes on.
        base_batch_size: The batch size that your learning rate was chosen for; None for the loader's first.
        loss_reduction: How your loss is reduced over a batch, "mean" or "sum".
        shadows: Policies by name that only watch: each epoch's record has the size that each would have chosen.
        every_steps: Decide also within epochs, after each so many optimizer steps of one; the rest of the epoch
            follows at once, a stream after the batches that its workers hold. Your loop stays as it is: the loader asks
            when the loop comes for its next batch. None for the ends of epochs alone.
        batches_per_step: How many of the loader's batches one optimizer step takes, for a loop that adds up their
            gradients. None to have it counted, from the first step on. All sizes that policies see and choose, and
            those of records, are those of a step: the loader's `batch_size` is a step's over this, rounded down.
        measure_always: Measure every epoch for the record, also those that no policy asks for.
        rank_weighting: Who weighs the gradients of ranks that hold unequal numbers of samples: "model" for the
            controller, which multiplies what enters the model backwards by `loader.rank_shard.loss_weight`; "loss" for
            a loop that multiplies its losses by that. A loss that is a sum gives the sum over the number of ranks.
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
        schedule_in: ScheduleIn | None = None,
        hand_set_lr: Reading | None = None,
        base_batch_size: int | None = None,
        loss_reduction: LossReduction = "mean",
        shadows: Mapping[str, Policy] | None = None,
        every_steps: int | None = None,
        batches_per_step: int | None = None,
        measure_always: bool = False,
        rank_weighting: Literal["model", "loss"] = "model",
    ) -> None:
        self._shadows = dict(shadows or {})
        optimizers = as_list(optimizer)
        require_parts(model, optimizers, loader, policy, estimator, self._shadows)
        loader.require_no_controller()
        require_choice("rank_weighting", rank_weighting, ("model", "loss"))
        require_choice("schedule_in", schedule_in, (None, "epochs", "steps", "calls"))
        require_choice("hand_set_lr", hand_set_lr, (None, "own", "in force"))
        couplings = resolve_couplings(policy, lr_coupling, optimizers)
        trained = Trained(model, optimizers, loader)
        chosen = resolve_estimator(policy, estimator, trained, shadows=self._shadows)
        self.ranks = loader.ranks
        require_same_setup(
            optimizers,
            loader,
            policy=repr(policy),
            shadows=repr(self._shadows),
            estimator=type(chosen).__name__,
            lr_coupling=couplings,
            loss_reduction=loss_reduction,
            every_steps=every_steps,
            batches_per_step=batches_per_step,
            base_batch_size=base_batch_size,
            measure_always=measure_always,
            rank_weighting=rank_weighting,
            schedule_in=schedule_in,
            hand_set_lr=hand_set_lr,
        )
        if base_batch_size is not None:
            require_count("base_batch_size", base_batch_size)
        if loader.dataset_size is not None and loader.batch_size > loader.dataset_size:
            loader.batch_size = loader.dataset_size  # what a batch really holds, and what the rate must start from
        self.policy, self.loader = policy, loader
        self._steps = StepCount(
            loader, told=batches_per_step, on_change=lambda: self._rates.begin_at(self._steps.batch_size)
        )
        self._needs = frozenset[str]().union(*(each.needs for each in self._policies))
        self.epoch = loader.epoch
        scene = trained.scene(loss_reduction)
        self._measuring = Measuring(
            chosen,
            scene,
            self._policies,
            always=measure_always or not BY_NOISE.isdisjoint(couplings),
        )
        self._measuring.accumulate = lambda: self._steps.unit
        self._stop_weighing: Callable[[], None] | None = None
        if rank_weighting == "model" and not loader.ranks.is_alone:
            self._stop_weighing = weigh_gradients(model, lambda: loader.rank_shard.weight_for(loss_reduction))
        self._every_steps = every_steps
        if every_steps is not None:
            require_step_cadence(every_steps, policy, self._measuring.estimator)
        self._steps.watch(
            scene.require_optimizer("a controller")
        )  # before the rates look: what a step holds is known when they do
        self._rates = Rates(
            optimizers,
            as_list(scheduler),
            kinds=couplings,
            loader=loader,
            first_batch_size=self._steps.batch_size,
            base_batch_size=base_batch_size,
            schedule_in=schedule_in,
            hand_set_lr=hand_set_lr,
        )
        self._is_under_way, self._is_closed = False, False
        self._changes: list[Change] = []
        self._history, self._limit = History(), SizeLimit()
        # The loader says when an epoch begins, so that the user's loop needs no call for it.
        self._stop_listening = loader.observe(self._before_batch)

    def step(self, *, loss: float | None = None) -> EpochRecord:
        """An epoch has ended: measure, decide, apply. The record says what was in force and what comes next.

        `loss` is the epoch's mean training loss, for policies that need it and for the record: of this rank's samples,
        or of all.
        """
        if self._is_closed:
            raise UsageError("this controller was closed: step() comes before close()")
        finished = finished_epoch(self.loader, self.epoch)
        self._steps.settle(finished.batch_size)
        self._steps.complete(finished.batches, every_steps=self._every_steps)
        self._rates.end_epoch()
        loss = loss_of_all_ranks(self.loader, loss, finished)
        needing = [policy for policy in self._policies if "loss" in policy.needs]
        if loss is None and needing:
            raise UsageError(f"{needing[0]} needs the epoch's mean training loss: control.step(loss=...)")
        seen = self._measurement(finished, self._measuring.end_of_epoch(), lr=self._rates.epoch_lr, loss=loss)
        seen, decision = self._agreed(replace(seen, history=self._timed(finished).with_epoch(seen)))
        shadows = {name: self._decided(policy, seen).batch_size for name, policy in self._shadows.items()}
        self.loader.batch_size = decision.batch_size // self._steps.unit
        self._rates.follow_decision(decision, seen)
        # Only now is the epoch over: what raised an error above can be mended and step() called again.
        self._history = seen.history.with_decision(seen.batch_size, decision)
        self._measuring.forget()
        self._steps.end_epoch()
        self._limit.is_news = False
        self._is_under_way = False
        self.epoch += 1
        record = epoch_record(
            seen,
            decision,
            at_fixed_weights=self._measuring.at_fixed_weights,
            lr=self._rates.epoch_lr,
            next_lr=self._rates.lr,
            shadows=shadows or None,
            changes=self._changes or None,
            measured=self._measuring.was_at_work if self._measuring.estimator is not None else None,
            micro_batch_size=finished.batch_size if self._steps.unit > 1 else None,
        )
        self._changes = []
        return record

    @property
    def effective_steps(self) -> float:
        """How many steps at the base batch size the steps so far were worth: the sum of AdaScale's gains.

        With any other coupling each step counts as one.
        """
        return self._rates.gains.at(self._steps.made)

    def take_scheduler_steps(self) -> int:
        """Return how often to step, now, a scheduler that is stepped with every batch, to go by `effective_steps`.

        Each call takes what has come together since the last one, so a second call returns 0.
        """
        return self._rates.take_scheduler_steps(self._steps.made)

    def limit_batch_size(self, most: int) -> None:
        """Let no batch have more samples from here on: cut the rest of the epoch so, and decide on none larger.

        For a step that ran out of memory, before it is made again in parts. What was measured of the epoch is thrown
        away, since the pass that failed is half counted in it.
        """
        require_count("most", most)
        self._limit.set(most)
        self._measuring.stop()
        if self._steps.batch_size > most:
            self.loader.resize_now(max(1, most // self._steps.unit))

    def plan(self) -> BatchPlan:
        """How the batch delivered last must go through the model. Ask once a batch, before its first forward pass."""
        full = rank_shard_of(self.loader.batch_size, self.ranks).mine
        return self._measuring.planned(BatchPlan(batch_size=full, rank_shard=self.loader.rank_shard))

    @property
    def _policies(self) -> list[Policy]:
        return [self.policy, *self._shadows.values()]

    def close(self) -> None:
        """Detach everything from model, loader and scheduler; batch size and optimizer settings stay as they are."""
        self._is_closed = True
        self._steps.close()
        self._rates.close()
        self._stop_listening()
        if self._stop_weighing is not None:
            self._stop_weighing()
        self._measuring.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One epoch

    def _before_batch(self, current: EpochProgress) -> None:
        """The loop has come for its next batch: the steps on those before are made."""
        size = current.batch_size * self._steps.unit
        if self._rates.catch_up(size, self._steps.made):  # it was set by hand
            self._note_change(size)
        if current.batches == 0 or not self._is_under_way:
            self._begin_epoch()
        elif self._every_steps is None:
            warn_if_endless(current)
        # Between two steps, and not among the batches of one. A resumed epoch comes here first: its state was saved
        # before the decision that was due.
        elif self._steps.came_after_step() and self._steps.is_due(self._every_steps):
            self._decide_within_epoch(current)

    def _begin_epoch(self) -> None:
        """Only here are hooks put on the model. What was seen of a pass that was broken off does not count."""
        self._changes, self._is_under_way = [], True
        self._rates.mark()
        self._steps.begin_epoch()
        self._measuring.begin_epoch(self.epoch + 1, self._steps.batch_size)

    def _decide_within_epoch(self, current: EpochProgress) -> None:
        """What is decided here is in force for the rest of the epoch."""
        self._steps.settle(current.batch_size)
        lr = self._rates.lr
        seen = self._measurement(current, self._measuring.window(), lr=lr)
        seen, decision = self._agreed(replace(seen, history=self._history.with_steps(seen)))
        self.loader.resize_now(decision.batch_size // self._steps.unit)
        self._steps.end_window()
        self._rates.follow_decision(decision, seen)
        self._history = seen.history.with_decision(seen.batch_size, decision)
        self._measuring.start_if_due(self.epoch + 1, self._steps.batch_size)
        if decision.batch_size != seen.batch_size or not math.isclose(self._rates.lr, lr):
            self._note_change(decision.batch_size)

    def _note_change(self, batch_size: int) -> None:
        self._rates.mark()
        self._changes.append(Change(self._steps.made, batch_size, self._rates.lr))

    def _measurement(
        self, done: EpochProgress, diversity: Diversity | None, *, lr: float, loss: float | None = None
    ) -> Measurement:
        dataset_size = self.loader.dataset_size
        return Measurement(
            epoch=done.epoch + 1,
            batch_size=done.batch_size * self._steps.unit,
            dataset_size=dataset_size,
            first_batch_size=self._rates.first_batch_size,
            step=self._steps.made,
            samples=self.loader.samples_delivered,
            # A window or an epoch that dropped its rest holds fewer samples: n * diversity means the same of both.
            diversity=diversity if diversity is None or dataset_size is None else diversity.of(dataset_size),
            lr=lr,
            lr_schedule_ratio=self._rates.schedule_ratio(),
            lr_growth=self._rates.growth,
            lr_coupling=self._rates.kind,
            loss=loss,
        )

    def _agreed(self, seen: Measurement) -> tuple[Measurement, Decision]:
        """Rank 0's view and decision. Rounding and clocks differ between ranks, decisions must not."""
        self.policy.check_start(seen.first_batch_size)  # which the first steps may have shown to be larger
        # Ranks that decided differently would wait for each other for ever.
        agreed: tuple[Measurement, Decision] = self.ranks.from_first((seen, self._decided(self.policy, seen)))
        return agreed

    def _timed(self, finished: EpochProgress) -> History:
        speed = finished.samples_per_second
        if speed is None or "throughputs" not in self._needs:
            return self._history
        return self._history.with_throughput(finished.batch_size * self._steps.unit, speed)

    def _decided(self, policy: Policy, seen: Measurement) -> Decision:
        """No batch has more samples than an epoch, or fewer than ranks and estimator need, and no rate follows one."""
        most = sys.maxsize if seen.dataset_size is None else seen.dataset_size
        least = min(max(self.ranks.size, self._measuring.min_batch_size), most)
        return self._limit.applied(in_multiples(policy, seen, self._steps.unit, at_most=most, at_least=least))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything but model, optimizer and scheduler, as plain containers and tensors.

        The same on all ranks, who must all call it, and fit for another number of ranks; only sums and gradients that
        FSDP2 sharded stay in shards (DTensors).
        """
        if self.loader.has_finished_pass(since=self.epoch):
            raise UsageError("an epoch has ended and its step() is still to come: call step() before saving")
        return {
            "version": STATE_VERSION,
            "settings": self._settings(),
            "epoch": self.epoch,
            "loader": self.loader.state_dict(),
            "measuring": self._measuring.state_dict(),
            "steps": self._steps.state_dict(),
            "rates": self._rates.state_dict(),
            "history": asdict(self._history),
            "limit": asdict(self._limit),
            "changes": [list(change) for change in self._changes],
        }

    def _settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the saved one."""
        parameters = self._measuring.scene.model.named_parameters()
        return {
            "policy": settings_of(self.policy),
            "estimator": type(self._measuring.estimator).__name__,
            "every_steps": self._every_steps,
            "parameters": {name.replace("_orig_mod.", ""): list(each.shape) for name, each in parameters},
            **self._rates.settings(),
        }

    def require_fits(self, place: str, state: dict[str, Any]) -> None:
        """Raise if a saved state is another run's; `place` says in the error where it stands."""
        for name, mine in (("version", STATE_VERSION), ("settings", self._settings())):
            require_same(f"{place}.{name}", state.get(name), mine)
        self.loader.require_same_data(state["loader"], f"{place}.loader")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved controller stood. Nothing is changed if the state does not fit."""
        # All checks come before the first change, so that a state that does not fit leaves everything as it was.
        self.require_fits("control", state)
        self.loader.load_state_dict(state["loader"])
        self._rates.load_state_dict(state["rates"])
        self._steps.load_state_dict(state["steps"])
        self.epoch, self._history = state["epoch"], History.from_dict(state["history"])
        self._changes, self._limit = [Change(*change) for change in state["changes"]], SizeLimit(**state["limit"])
        self._is_under_way = state["loader"]["pass"] is not None
        self._measuring.load_state_dict(state["measuring"], is_under_way=self._is_under_way)
