"""One process that works on a study until nothing is left to do."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Self

from divebatch.errors import DivebatchError, DivergedError, StoppedError
from divebatch.lab.experiments import Run, execute
from divebatch.lab.search.plan import Plan
from divebatch.lab.search.space import Point
from divebatch.lab.search.storage import storage_failures
from divebatch.lab.search.study import Claim, Study
from divebatch.lab.training import StopRequest
from divebatch.records import EpochRecord

BEATS_PER_TIMEOUT = 6
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Result:
    """A trial that this process has finished; `value` is that of the metric, None where it failed."""

    number: int
    point: Point
    value: float | None
    note: str = ""


OnResult = Callable[[Result], None]
OnWait = Callable[[int], None]


def open_study(plan: Plan, *, heartbeat_timeout: float = 60.0) -> Study:
    """The plan's study, new or begun."""
    study = Study(
        plan.url,
        plan.name,
        plan.space,
        sampler=plan.sampler,
        num_trials=plan.num_trials,
        heartbeat_timeout=heartbeat_timeout,
        metric=plan.experiment.metric,
    )
    study.agree_on(plan.description)
    return study


def work(plan: Plan, study: Study, *, on_result: OnResult, on_wait: OnWait | None = None) -> None:
    """Run trials until every one is done, those of other processes included: a dead one's trial is taken over.

    Asked to stop, the trial under way is saved and given back, and `StoppedError` rises.
    """
    with storage_failures(), StopRequest() as stop:
        while True:
            claim = study.claim()
            if claim is not None:
                on_result(_run(plan, study, claim, stop))
            elif not _others_are_busy(study, stop, on_wait):
                return


def _others_are_busy(study: Study, stop: StopRequest, on_wait: OnWait | None) -> bool:
    """Wait a little if other processes have trials that may yet be left to us."""
    if stop.is_set:
        raise StoppedError("stopped while waiting for other processes")
    running = study.num_running()
    if running and on_wait:
        on_wait(running)
    if running:
        time.sleep(POLL_SECONDS)
    return running > 0


def _run(plan: Plan, study: Study, claim: Claim, stop: StopRequest) -> Result:
    study.note(claim.trial_id, "worker", f"{socket.gethostname()}:{os.getpid()}")
    try:
        with Heartbeat(study, claim.trial_id) as heartbeat:
            value, note = _train(plan, claim, stop, heartbeat)
    except StoppedError as error:
        study.give_back(claim.trial_id, "its process was asked to stop")
        raise StoppedError(f"trial {claim.number}: {error}") from error
    except GivenUp:
        return Result(claim.number, claim.point, None, "given up by another process")
    except DivebatchError as error:
        study.fail(claim.trial_id, str(error))
        return Result(claim.number, claim.point, None, str(error))
    study.note(claim.trial_id, "note", note)
    if not study.tell(claim.trial_id, value):
        return Result(claim.number, claim.point, None, "given up by another process")
    return Result(claim.number, claim.point, value, note)


def _train(plan: Plan, claim: Claim, stop: StopRequest, heartbeat: "Heartbeat") -> tuple[float, str]:
    """The mean final value over the seeds, and a note on it. A run that diverges has the worst value there is."""
    values, num_diverged = [], 0
    for run in plan.runs(claim.point):
        try:
            values.append(_final_value(run, stop, heartbeat))
        except DivergedError:
            values.append(plan.experiment.metric.worst)
            num_diverged += 1
    return fmean(values), f"{num_diverged} of {len(values)} diverged" if num_diverged else ""


def _final_value(run: Run, stop: StopRequest, heartbeat: "Heartbeat") -> float:
    last: list[EpochRecord] = []

    def keep(record: EpochRecord) -> None:
        last[:] = [record]
        heartbeat.require_trust()

    execute(run, resume=True, on_epoch=keep, on_resume=keep, stop=stop)  # what a dead process left is continued
    value = run.experiment.metric.of(last[0])
    if value is None or last[0].val_loss is None:
        raise DivergedError("its last validation loss is not finite")
    return value


class GivenUp(Exception):  # noqa: N818  not an error: another process has the trial
    """Others saw no heartbeat for too long and have taken over."""


class Heartbeat:
    """Inside, a thread shows every now and then that the trial's process lives."""

    def __init__(self, study: Study, trial_id: int) -> None:
        self._study, self._trial_id = study, trial_id
        self._end, self._is_trusted = threading.Event(), True
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def require_trust(self) -> None:
        """Raise if the trial is no longer ours; for a process that was frozen and woke again."""
        if not self._is_trusted:
            raise GivenUp

    def _beat(self) -> None:
        count = 1
        while not self._end.wait(self._study.heartbeat_timeout / BEATS_PER_TIMEOUT):
            with suppress(Exception):  # a busy database: the next beat will do
                self._is_trusted = self._study.is_running(self._trial_id)
                if self._is_trusted:
                    self._study.beat(self._trial_id, count)
            count += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
