"""The one loop a user drives: observe, estimate, decide, apply, record."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.checks import require_count
from divebatch.controller_checks import require_parts, require_same_setup, require_step_cadence
from divebatch.data.epoch_progress import Pass
from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import CheckpointError, UsageError
from divebatch.estimators import Estimator, Scene, make_estimator
from divebatch.estimators.catalog import require_fit
from divebatch.lr import BY_NOISE, LrCoupling
from divebatch.measurement import Decision, Diversity, History, Measurement
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.rank_weighting import weigh_gradients as weigh
from divebatch.policies import Policy
from divebatch.policies.bounds import require_coupling
from divebatch.ranks import inside_ddp
from divebatch.records import Change, EpochRecord

STATE_VERSION = 1
_NOT_MEASURED = object()


class Controller:
    """Lets `policy` set the loader's batch size after each epoch, and the learning rate follow it.

    Call `step()` once after each epoch, after the scheduler's own step. What the policy does not need is not
    measured: an epoch without measuring runs without any hook on the model.

    `estimator` is "trajectory" (the paper's, the default), "split", "moments", "ranks" or "per-sample" (unbiased, at
    fixed weights, with an interval), "oracle" (exact; needs `loss_fn`) or an `Estimator`.
    `lr_coupling` is "none", "linear" or "adascale" (SGD), "sqrt" or "adascale-sqrt" (Adam-like optimizers); left out it
    is the policy's own, else "none". `base_batch_size` is the batch size your learning rate was chosen for, where it is
    not the loader's first. `scheduler` is the one that drives the optimizer, or a list of all that do. `loss_reduction`
    says how your loss is reduced over the batch. `shadows` are policies by name that only watch: after each epoch the
    record says which size each would have chosen from there.

    With `every_steps=k` the policy also decides within epochs, after each k-th batch of one, and the rest of the epoch
    follows at once. Your loop stays as it is: the loader asks when the loop comes for its next batch.

    Under a process group (`loader.ranks`) all ranks make a controller alike and call its methods alike. `model` is
    yours, the DDP wrapper around it, or sharded by FSDP2. What is measured is that of all ranks, and all take rank 0's
    view of it, so that they decide the same. Gradients are exact although ranks may hold unequal shares of a batch:
    the controller multiplies what enters the model backwards by `loader.rank_shard.loss_weight`, unless a loop with
    `weigh_gradients=False` does it to its losses. A loss that is a sum gives the sum over the number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: AdaptiveLoader,
        policy: Policy,
        *,
        estimator: str | Estimator | None = None,
        lr_coupling: str | None = None,
        base_batch_size: int | None = None,
        scheduler: Any = None,
        loss_reduction: str = "mean",
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        shadows: Mapping[str, Policy] | None = None,
        every_steps: int | None = None,
        weigh_gradients: bool = True,
    ) -> None:
        require_parts(model, optimizer, loader, policy, estimator)
        lr_coupling = lr_coupling or policy.lr_coupling or "none"
        self.ranks = loader.ranks
        require_same_setup(
            (optimizer, loader, policy, estimator),
            shadows=repr(dict(shadows or {})),
            lr_coupling=lr_coupling,
            loss_reduction=loss_reduction,
            every_steps=every_steps,
            base_batch_size=base_batch_size,
            weigh_gradients=weigh_gradients,
        )
        require_coupling(policy, lr_coupling)
        if base_batch_size is not None:
            require_count("base_batch_size", base_batch_size)
        if loader.dataset_size is not None and loader.batch_size > loader.dataset_size:
            loader.batch_size = loader.dataset_size  # what a batch really holds, and what the rate must start from
        self.policy, self.loader = policy, loader
        self._shadows = dict(shadows or {})
        self._needs = frozenset[str]().union(policy.needs, *(shadow.needs for shadow in self._shadows.values()))
        self._rate_needs_noise = lr_coupling in BY_NOISE
        self.epoch = loader.epoch
        scene = _scene(model, loader, loss_reduction, loss_fn, optimizer)
        self._estimator = self._bind(estimator or policy.estimator, scene)
        self._stop_weighing = _weighed(model, loader, loss_reduction) if weigh_gradients else None
        self._every_steps = every_steps
        if every_steps is not None:
            require_step_cadence(every_steps, policy, loader, self._estimator)
        schedulers = scheduler if isinstance(scheduler, Sequence) else [scheduler] if scheduler is not None else []
        self._coupling = LrCoupling(
            optimizer,
            schedulers,
            kind=lr_coupling,
            first_batch_size=loader.batch_size,
            base_batch_size=base_batch_size,
        )
        self._measuring, self._is_closed = False, False
        self._diversity: Diversity | None = None
        self._changes: list[Change] = []
        self._history = History()
        loader.forget_finished_pass()
        self._forget_listeners = [loader.on_new_pass(self._on_new_pass), loader.on_step(self._on_step)]
        self._begin_epoch()

    def step(self, *, loss: float | None = None) -> EpochRecord:
        """An epoch has ended: measure, decide, apply. The record says what was in force and what comes next.

        `loss` is the epoch's mean training loss, for policies that need it and for the record: of this rank's samples,
        or of all.
        """
        self._check_may_step()
        loss = self._loss_of_all_ranks(loss)
        if loss is None and "loss" in self._needs:
            raise UsageError(f"{self._who_needs('loss')} needs the epoch's mean training loss: control.step(loss=...)")
        finished = self.loader.require_finished_pass()
        seen = self._measurement(finished, self._measured_diversity(), lr=self._lr, loss=loss)
        seen, decision = self._agreed(replace(seen, history=self._timed(finished).with_epoch(seen)))
        shadows = {name: self._within_limits(p.next(seen), seen).batch_size for name, p in self._shadows.items()}
        self.loader.batch_size = decision.batch_size
        self._follow(decision, seen)
        # Only now is the epoch over: what raised an error above can be mended and step() called again.
        self.loader.forget_finished_pass()
        self._history = seen.history.with_decision(seen.batch_size, decision)
        self._diversity = None
        self.epoch += 1
        record = replace(self._record(seen, decision), shadows=shadows or None, changes=self._changes or None)
        self._changes = []
        self._begin_epoch()
        return record

    @property
    def gain_sum(self) -> float:
        """How many steps at the base batch size the steps so far were worth: the sum of AdaScale's gains.

        With any other coupling each step counts as one.
        """
        return self._coupling.gains.at(self.loader.batches_delivered)

    def scheduler_steps(self) -> int:
        """How often to step a scheduler now that is stepped with every batch, for its course to go by `gain_sum`."""
        return self._coupling.gains.due(self.loader.batches_delivered)

    @property
    def is_measuring(self) -> bool:
        """Whether the epoch under way is being measured."""
        return self._measuring

    @property
    def min_micro_batches(self) -> int:
        """Into how many micro-batches a batch must be cut at least, for the estimator at work to see anything."""
        return self._at_work.min_micro_batches if self._at_work is not None else 1

    @property
    def replay_token(self) -> object:
        """A recorded backward pass may be replayed while this is the same; None: what is measured needs Python."""
        return self._at_work.replay_token if self._at_work is not None else _NOT_MEASURED

    def see_replay(self, gradients: Mapping[str, Tensor], weight: LossWeight) -> None:
        """A recorded backward pass was replayed, which no hook sees: its own gradients, and the weight of its loss."""
        if self._at_work is not None:
            self._at_work.see_replay(gradients, weight)

    @property
    def _at_work(self) -> Estimator | None:
        return self._estimator if self._measuring else None

    def close(self) -> None:
        """Detach everything from model, loader and scheduler; batch size and learning rate stay as they are."""
        self._is_closed = True
        self._coupling.close()
        for forget in self._forget_listeners:
            forget()
        if self._stop_weighing is not None:
            self._stop_weighing()
        if self._estimator is not None:
            self._estimator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One epoch

    def _begin_epoch(self) -> None:
        self._lr = self._coupling.rates()[0]
        if self._estimator is None:
            return
        measuring = [p for p in (self.policy, *self._shadows.values()) if "diversity" in p.needs]
        due = self._rate_needs_noise or any(p.measures(self.epoch + 1, self.loader.batch_size) for p in measuring)
        if due and not self._measuring:
            self._estimator.start()
        elif self._measuring and not due:
            self._estimator.close()
        self._measuring = due

    def _on_new_pass(self) -> None:
        """Whatever was seen before the epoch's first batch (a trial pass, one broken off) does not count."""
        self._changes = []
        self._begin_epoch()  # anew: the batch size may have been set by hand since
        if self._at_work is not None:
            self._at_work.restart()

    def _on_step(self, current: Pass) -> None:
        """Between two batches of an epoch. What is decided here is in force for the rest of it."""
        if self._every_steps is None or current.batches % self._every_steps:
            return
        lr, at_record = self._coupling.rates()[0], self._lr
        diversity = self._at_work.window() if self._at_work is not None else None
        seen = self._measurement(current, diversity, lr=lr)
        seen, decision = self._agreed(replace(seen, history=self._history.with_steps(seen)))
        self.loader.recut(decision.batch_size)
        self._follow(decision, seen)
        self._history = seen.history.with_decision(seen.batch_size, decision)
        self._begin_epoch()  # whether to measure on may depend on the size
        if decision.batch_size != seen.batch_size or not math.isclose(self._lr, lr):
            self._changes.append(Change(seen.step, decision.batch_size, self._lr))
        else:
            self._lr = at_record

    def _measured_diversity(self) -> Diversity | None:
        if self._at_work is not None:
            self._diversity = self._at_work.finish()
            self._measuring = False
        return self._diversity

    def _check_may_step(self) -> None:
        if self._is_closed:
            raise UsageError("this controller was closed: step() comes before close()")
        finished = self.loader.finished_pass
        if finished is not None and finished.epoch != self.epoch:
            raise UsageError(
                f"step() must be called once after each epoch: {finished.epoch + 1 - self.epoch} epochs have ended "
                f"since the last call. A complete pass for evaluation counts as one: use loader.full_pass() instead"
            )

    def _measurement(
        self, done: Pass, diversity: Diversity | None, *, lr: float, loss: float | None = None
    ) -> Measurement:
        dataset_size = self.loader.dataset_size
        assert dataset_size is not None  # known once an epoch has ended, and within one where it may be recut
        return Measurement(
            epoch=done.epoch + 1,
            batch_size=done.batch_size,
            dataset_size=dataset_size,
            first_batch_size=self._coupling.first_batch_size,
            step=self.loader.batches_delivered,
            samples=self.loader.samples_delivered,
            diversity=diversity,
            lr=lr,
            lr_schedule_ratio=self._coupling.schedule_ratio(),
            loss=loss,
        )

    def _agreed(self, seen: Measurement) -> tuple[Measurement, Decision]:
        """Rank 0's view and decision. Rounding and clocks differ between ranks, decisions must not."""
        agreed: tuple[Measurement, Decision] = self.ranks.from_first(
            (seen, self._within_limits(self.policy.next(seen), seen))
        )
        return agreed

    def _who_needs(self, name: str) -> Policy:
        return next(policy for policy in (self.policy, *self._shadows.values()) if name in policy.needs)

    def _timed(self, finished: Pass) -> History:
        speed = finished.samples_per_second
        if speed is None or "throughputs" not in self._needs:
            return self._history
        return self._history.with_throughput(finished.batch_size, speed)

    def _loss_of_all_ranks(self, loss: float | None) -> float | None:
        if self.ranks.is_alone:
            return loss
        count = self.loader.require_finished_pass().local_samples if loss is not None else 0
        return self.ranks.mean(loss, count)

    def _within_limits(self, decision: Decision, seen: Measurement) -> Decision:
        """No batch has more samples than an epoch or fewer than there are ranks, and no learning rate follows one."""
        decision, ranks = decision.at_most(seen.dataset_size), self.ranks.size
        if decision.batch_size >= ranks:
            return decision
        reason = f"{decision.reason}; raised to the {ranks} ranks".lstrip("; ")
        return replace(decision, batch_size=ranks, reason=reason)

    def _follow(self, decision: Decision, seen: Measurement) -> None:
        """Put the learning rate where the decision, and for some couplings the noise, wants it."""
        diversity = seen.diversity
        noise_scale = diversity.noise_to_signal() if self._rate_needs_noise and diversity is not None else None
        self._coupling.follow(
            decision.batch_size, lr_factor=decision.lr_factor, noise_scale=noise_scale, step=seen.step
        )

    def _record(self, seen: Measurement, decision: Decision) -> EpochRecord:
        diversity = seen.diversity
        low, high = diversity.interval() if diversity is not None else (None, None)
        return EpochRecord(
            epoch=seen.epoch,
            batch_size=seen.batch_size,
            lr=self._lr,
            steps=seen.step,
            samples=seen.samples,
            train_loss=None if seen.loss is None else float(seen.loss),
            diversity=diversity.value if diversity is not None and diversity.is_defined else None,
            diversity_low=low,
            diversity_high=high,
            next_batch_size=decision.batch_size,
            next_lr=self._coupling.rates()[0],
            reason=decision.reason,
        )

    def _bind(self, estimator: str | Estimator | None, scene: Scene) -> Estimator | None:
        bound = make_estimator(estimator or "trajectory") if isinstance(estimator, str | None) else estimator
        if "diversity" not in self._needs and not self._rate_needs_noise:
            return None
        require_fit(bound, scene.model)
        bound.bind(scene)
        return bound

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything but model, optimizer and scheduler, as plain containers and tensors.

        The same on all ranks, who must all call it, and fit for another number of ranks; only sums that FSDP2 sharded
        stay in shards (DTensors).
        """
        if self.loader.finished_pass is not None:
            raise UsageError("an epoch has ended and its step() is still to come: call step() before saving")
        return {
            "version": STATE_VERSION,
            "policy": repr(self.policy),
            "estimator_kind": type(self._estimator).__name__,
            "epoch": self.epoch,
            "lr": self._lr,
            "loader": self.loader.state_dict(),
            "estimator": self._estimator.state_dict() if self._estimator else {},
            "coupling": self._coupling.state_dict(),
            "history": asdict(self._history),
            "every_steps": self._every_steps,
            "changes": [list(change) for change in self._changes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved controller stood. Nothing is changed if the state does not fit."""
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(f"state has version {state.get('version')}, this code reads {STATE_VERSION}")
        if state["policy"] != repr(self.policy):
            raise CheckpointError(f"the checkpoint's policy is {state['policy']}, this one {self.policy!r}")
        if state["estimator_kind"] != type(self._estimator).__name__:
            here = type(self._estimator).__name__
            raise CheckpointError(f"the checkpoint's estimator is {state['estimator_kind']}, this one {here}")
        every_steps = state.get("every_steps", self._every_steps)  # not in states of before
        if every_steps != self._every_steps:
            raise CheckpointError(f"the checkpoint has every_steps={every_steps}, this run {self._every_steps}")
        if self._estimator is not None:
            self._estimator.check_state(state["estimator"])
        self.loader.check_state(state["loader"])
        self._coupling.check_state(state["coupling"])
        self.loader.load_state_dict(state["loader"])
        self._coupling.load_state_dict(state["coupling"])
        self.epoch, self._history = state["epoch"], History.from_dict(state.get("history", {}))
        if self._estimator is not None:
            self._estimator.close()
            self._measuring = False
        self._begin_epoch()
        self._lr, self._changes = state["lr"], [Change(*change) for change in state.get("changes", [])]
        if self._at_work is not None:
            self._at_work.load_state_dict(state["estimator"])


def _scene(model: nn.Module, loader: AdaptiveLoader, loss_reduction: Any, loss_fn: Any, optimizer: Optimizer) -> Scene:
    return Scene(
        inside_ddp(model),
        loader.full_pass,
        loss_reduction,
        loss_fn,
        optimizer,
        lambda: loader.samples_delivered,
        loader.ranks,
        lambda: loader.rank_shard,
        lambda: loader.local_samples_delivered,
    )


def _weighed(model: nn.Module, loader: AdaptiveLoader, loss_reduction: str) -> Callable[[], None] | None:
    if loader.ranks.is_alone:
        return None
    return weigh(model, lambda: loader.rank_shard.weight_for(loss_reduction))
