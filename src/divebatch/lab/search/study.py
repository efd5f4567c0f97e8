"""A study that several processes share: each point is run once, also when processes are killed.

Nothing here relies on two steps happening together. Whoever looks for work first repairs what others left behind, and
whatever two processes did twice by chance is told apart by the trials' numbers: of several trials of one point that
count, the lowest number is the one that is run.
"""

import json
import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError
from divebatch.lab.search.space import Dimension, Point, Space
from divebatch.lab.search.storage import open_storage, require_optuna
from divebatch.records import Metric

POINT, BEAT, ERROR, AGAIN = "point", "beat", "error", "again"
"""Noted on a trial: its settings, the heartbeat of its process, why it failed for good, why it is to be run again."""
SAMPLERS = ("grid", "random", "tpe")


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial that this process, and no other, is to run."""

    trial_id: int
    number: int
    point: Point
    is_queued: bool = True
    """False where a sampler chose the point just now."""


class Study:
    """One search in its storage.

    A trial's process shows a heartbeat, a number that changes. It is compared with what this process saw before, by
    this process's own clock: clocks of other machines do not matter.

    Args:
        url: Of the database.
        name: The study's.
        space: What is searched over.
        sampler: How points are chosen: "grid", "random" or "tpe".
        num_trials: Points to try; None for a grid, which tries all of its own.
        heartbeat_timeout: Seconds without a heartbeat after which a trial's process counts as dead.
        metric: What trials are judged by; the validation accuracy by default.
        clock: Gives the seconds.
    """

    def __init__(
        self,
        url: str,
        name: str,
        space: Space,
        *,
        sampler: str = "grid",
        num_trials: int | None = None,
        heartbeat_timeout: float = 60.0,
        metric: Metric | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space, self.num_trials = space, num_trials
        self.metric = metric or Metric()
        self.heartbeat_timeout, self._clock = heartbeat_timeout, clock
        self.is_grid = sampler == "grid"
        self._check(sampler)
        self._optuna = require_optuna()
        self._states = self._optuna.trial.TrialState
        self.storage = open_storage(url)
        self._study = self._optuna.create_study(
            storage=self.storage,
            study_name=name,
            direction="maximize" if self.metric.higher_is_better else "minimize",
            load_if_exists=True,
            sampler=self._make_sampler(sampler),
        )
        self._study_id = self.storage.get_study_id_from_name(name)
        self._heartbeats: dict[int, tuple[Any, float]] = {}

    def _check(self, sampler: str) -> None:
        require_choice("sampler", sampler, SAMPLERS)
        if self.is_grid and not self.space.is_grid:
            ranges = [str(each) for each in self.space.dimensions if each.bounds is not None]
            raise ArgumentError(f"a grid needs values, not a range: {ranges[0]}. List them, or use sampler='tpe'.")
        if self.is_grid == (self.num_trials is not None):
            raise ArgumentError("a grid has as many trials as points; other samplers need a number of trials")

    def _make_sampler(self, name: str) -> Any:
        """Seeded by the system: processes with one seed would all try the same points."""
        samplers = self._optuna.samplers
        if name != "tpe":
            return samplers.RandomSampler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return samplers.TPESampler(constant_liar=True)  # what others try right now counts as a bad place

    # What it is for

    def agree_on(self, description: Mapping[str, Any]) -> None:
        """Note what this study searches; an error if it has begun as something else."""
        wanted = json.loads(json.dumps(description))
        if "search" not in self._study.user_attrs:
            self._study.set_user_attr("search", wanted)
        found = self._study.user_attrs["search"]
        for key in sorted({*wanted, *found}):
            if wanted.get(key) != found.get(key):
                raise ArgumentError(
                    f"study '{self._study.study_name}' has begun with another {key}: {found.get(key)!r}, "
                    f"not {wanted.get(key)!r}. Choose another study_name, or give what it began with."
                )

    @property
    def total(self) -> int:
        """Trials that count when all is done."""
        return len(list(self.space.points())) if self.num_trials is None else self.num_trials

    def trials(self) -> list[Any]:
        """Optuna's, all of them, by number."""
        found: list[Any] = self._study.get_trials(deepcopy=False)
        return sorted(found, key=lambda trial: trial.number)

    def completed(self) -> list[Any]:
        """Those with a result, by number."""
        return [trial for trial in self.trials() if trial.state == self._states.COMPLETE]

    def failed(self) -> list[Any]:
        """Those that failed for good, by number."""
        return [trial for trial in self.trials() if ERROR in trial.user_attrs]

    def num_running(self) -> int:
        """Trials under way, of all processes."""
        return sum(trial.state == self._states.RUNNING for trial in self.trials())

    # Looking for work

    def claim(self) -> Claim | None:
        """The next trial to run; None where nothing is left to begin, though others may still be running."""
        self._requeue_dead_trials()
        while True:
            is_waiting = self._queue_a_missing_point()
            claim = self._claim_waiting() or self._claim_sampled()
            if claim is not None and self._is_ours_to_run(claim):
                return claim
            if claim is None and not is_waiting:
                return None

    def _requeue_dead_trials(self) -> None:
        """Fail every running trial whose heartbeat has not changed for too long; it will be queued again."""
        now = self._clock()
        running = [trial for trial in self.trials() if trial.state == self._states.RUNNING]
        for trial in running:
            heartbeat = trial.user_attrs.get(BEAT)
            seen, since = self._heartbeats.get(trial.number, (None, now))
            if trial.number not in self._heartbeats or heartbeat != seen:
                self._heartbeats[trial.number] = (heartbeat, now)
            elif now - since > self.heartbeat_timeout:
                self.give_back(self._id_of(trial.number), "its process died")

    def _queue_a_missing_point(self) -> bool:
        """See to it that a trial waits, if there is a point that no trial stands for; whether one does.

        With other processes at work any missing point is taken, not the first: others look for work at the same moment.
        """
        trials = self.trials()
        states = {trial.state for trial in trials}
        if self._states.WAITING in states:
            return True
        missing = self._missing(trials)
        if not missing:
            return False
        point = random.choice(missing) if self._states.RUNNING in states else missing[0]
        self._study.enqueue_trial(point, user_attrs={POINT: point})
        return True

    def _missing(self, trials: list[Any]) -> list[Point]:
        counting = [trial for trial in trials if self._counts(trial)]
        if self.is_grid:
            wanted = {_key_of(point): point for point in self.space.points()}
        elif len(counting) < self.total:
            wanted = {
                _key(trial): trial.user_attrs[POINT] for trial in trials if {AGAIN, POINT} <= trial.user_attrs.keys()
            }
        else:
            wanted = {}
        covered = set(map(_key, counting))
        return [point for key, point in wanted.items() if key not in covered]

    def _claim_waiting(self) -> Claim | None:
        for trial in self.trials():
            if trial.state == self._states.WAITING:
                trial_id = self._id_of(trial.number)
                if self._begin(trial_id):
                    self.beat(trial_id, 0)
                    self._suggest(self._optuna.trial.Trial(self._study, trial_id))
                    return Claim(trial_id, trial.number, dict(trial.user_attrs[POINT]))
        return None

    def _begin(self, trial_id: int) -> bool:
        """From waiting to running: the step that only one process can make."""
        try:
            return bool(self.storage.set_trial_state_values(trial_id, self._states.RUNNING))
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _claim_sampled(self) -> Claim | None:
        if self.num_trials is None or sum(map(self._counts, self.trials())) >= self.num_trials:
            return None
        trial = self._study.ask()
        is_queued = POINT in trial.user_attrs  # by another process, since we looked
        point = self._suggest(trial)
        trial.set_user_attr(POINT, point)
        return Claim(self._id_of(trial.number), trial.number, point, is_queued)

    def _suggest(self, trial: Any) -> Point:
        """Take the settings from a queued trial, or let the sampler choose them."""
        return {dimension.name: _suggest(trial, dimension) for dimension in self.space.dimensions}

    def _is_ours_to_run(self, claim: Claim) -> bool:
        """Whether no earlier trial stands for the same point, and not too many have been sampled."""
        earlier = [trial for trial in self.trials() if trial.number < claim.number and self._counts(trial)]
        is_first = not claim.is_queued or _key_of(claim.point) not in set(map(_key, earlier))
        has_room = self.is_grid or len(earlier) < self.total
        if not (is_first and has_room):
            self._finish(claim.trial_id, self._states.FAIL)
        return is_first and has_room

    # While a trial runs, and after

    def beat(self, trial_id: int, count: int) -> None:
        """Show that the trial's process lives; `count` must differ from the last one."""
        self.storage.set_trial_user_attr(trial_id, BEAT, count)

    def is_running(self, trial_id: int) -> bool:
        """False once another process has given this one up."""
        return bool(self.storage.get_trial(trial_id).state == self._states.RUNNING)

    def note(self, trial_id: int, name: str, value: Any) -> None:
        """Keep a value with a trial."""
        self.storage.set_trial_user_attr(trial_id, name, value)

    def tell(self, trial_id: int, value: float) -> bool:
        """The result; False where the trial was given up meanwhile, for then its point is run by another."""
        return self._finish(trial_id, self._states.COMPLETE, value)

    def fail(self, trial_id: int, reason: str) -> None:
        """It cannot be run: not to be tried again."""
        self._finish_noting(trial_id, ERROR, reason)

    def give_back(self, trial_id: int, reason: str) -> None:
        """It was not finished: to be run again by whoever comes first."""
        self._finish_noting(trial_id, AGAIN, reason)

    def _finish_noting(self, trial_id: int, name: str, reason: str) -> None:
        try:
            self.storage.set_trial_user_attr(trial_id, name, reason)
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return
        self._finish(trial_id, self._states.FAIL)

    def _finish(self, trial_id: int, state: Any, value: float | None = None) -> bool:
        try:
            return bool(self.storage.set_trial_state_values(trial_id, state, None if value is None else [value]))
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _counts(self, trial: Any) -> bool:
        """Whether it stands for its point: it waits, runs, has a result, or failed for good."""
        states = (self._states.WAITING, self._states.RUNNING, self._states.COMPLETE)
        return trial.state in states or ERROR in trial.user_attrs

    def _id_of(self, number: int) -> int:
        return int(self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number))


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.bounds is None:
        return trial.suggest_categorical(dimension.name, dimension.values)
    low, high = dimension.bounds
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(dimension.name, low, high, log=True)
    return trial.suggest_float(dimension.name, low, high, log=True)


def _key_of(point: Mapping[str, Any] | None) -> str:
    """The same for equal points, also of different processes."""
    return json.dumps(point, sort_keys=True)


def _key(trial: Any) -> str:
    return _key_of(trial.user_attrs.get(POINT))
