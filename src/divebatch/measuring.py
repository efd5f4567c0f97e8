"""When an estimator is at work: in the epochs that a policy asks for, and in no others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from divebatch.checks import warn_user
from divebatch.data.micro_batches import BatchPlan
from divebatch.estimators import Estimator, Scene, require_fit
from divebatch.estimators.step_hooks import tell_steps
from divebatch.measurement import Diversity
from divebatch.policies import Policy


class Measuring:
    """Puts an estimator to work for the epochs that are to be measured.

    Args:
        estimator: What measures.
        scene: What it may look at.
        policies: Those that decide or watch; the ones that need the diversity say which epochs are measured.
        always: Whether every epoch is measured, whatever the policies need.
    """

    def __init__(self, estimator: Estimator, scene: Scene, policies: Sequence[Policy], *, always: bool) -> None:
        self._asking, self._always = [policy for policy in policies if "diversity" in policy.needs], always
        self.estimator: Estimator | None = None
        """None where nobody will ever ask."""
        if self._asking or always:
            require_fit(estimator, scene.model)
            estimator.bind(scene)
            self.estimator = estimator
        self.scene, self._deciding, self._has_warned = scene, policies[0], False
        self._warn_of_caveat()
        self.at_work: Estimator | None = None
        """The estimator while it measures."""
        self.was_at_work = False
        """Whether anything of the epoch was measured."""
        self._found: Diversity | None = None
        self.accumulate: Callable[[], int] = lambda: 1
        """Gives the loader's batches of an optimizer step."""
        self._stop_telling: Callable[[], None] = lambda: None

    @property
    def at_fixed_weights(self) -> bool:
        """Whether what is found is the gradient noise scale."""
        return self.estimator is not None and self.estimator.at_fixed_weights

    @property
    def min_batch_size(self) -> int:
        """The fewest samples that a batch must have for the estimator to see anything."""
        return 1 if self.estimator is None else self.estimator.min_batch_size

    @property
    def min_micro_batches(self) -> int:
        """The fewest backward passes of a measured batch."""
        return 1 if self.estimator is None else self.estimator.min_micro_batches

    def begin_epoch(self, epoch: int, batch_size: int) -> None:
        """Start anew. What was seen of a pass that was broken off does not count."""
        self.stop()
        self.was_at_work = False
        self.start_if_due(epoch, batch_size)

    def start_if_due(self, epoch: int, batch_size: int) -> None:
        """Start, go on or stop, as policies want; that may depend on a batch size that changes within an epoch.

        `epoch` counts from 1.
        """
        if self.estimator is None:
            return
        due = self._is_due(epoch, batch_size)
        if due and self.at_work is None:
            self.start()
        elif not due:
            self.stop()
        if due:
            self._warn_of_caveat()  # what was right at the beginning may have changed with the optimizer's settings

    def start(self) -> None:
        """Put the estimator to work, whatever policies want."""
        assert self.estimator is not None
        self.estimator.start()
        self._tell()
        self.at_work, self.was_at_work = self.estimator, True

    def _tell(self) -> None:
        assert self.estimator is not None
        if self.scene.optimizer is not None:
            self._stop_telling = tell_steps(self.estimator, self.scene, accumulate=self.accumulate)

    def _is_due(self, epoch: int, batch_size: int) -> bool:
        # A monotone policy at its cap has nothing left to decide and asks for no measurement.
        return self._always or any(policy.measures(epoch, batch_size) for policy in self._asking)

    def _warn_of_caveat(self) -> None:
        if self.estimator is None or self._has_warned or self._deciding not in self._asking:
            return
        if caveat := self.estimator.caveat(self.scene):
            self._has_warned = True
            warn_user(f"{type(self._deciding).__name__} goes by the noise scale, and {caveat}")

    def stop(self) -> None:
        """Detach the estimator, whatever it has seen."""
        if self.at_work is not None:
            self.at_work.close()
            self._stop_telling()
        self.at_work = None

    def planned(self, plan: BatchPlan) -> BatchPlan:
        """Return `plan` with what the estimator needs of the batch, where one is at work."""
        if self.at_work is None:
            return plan
        return replace(
            plan,
            measuring=True,
            min_micro_batches=self.at_work.min_micro_batches,
            replay_token=self.at_work.replay_token,
            see_replay=self.at_work.see_replay,
        )

    def window(self) -> Diversity | None:
        """What was seen since the last reading within the epoch; measuring goes on."""
        return self.at_work.window() if self.at_work is not None else None

    def end_of_epoch(self) -> Diversity | None:
        """What the epoch showed, however often it is asked for before `forget`; detaches the estimator."""
        if self.at_work is not None:
            # Not at the end of the iterator: frameworks that prefetch reach that before the last backward passes.
            self._found = self.at_work.finish()
            self._stop_telling()
            self.at_work = None
        return self._found

    def forget(self) -> None:
        """The epoch is over and decided on."""
        self._found = None

    def state_dict(self) -> dict[str, Any]:
        """The estimator's sums, and whether there are any."""
        sums = self.estimator.state_dict() if self.estimator else {}
        return {
            "estimator": sums,
            "is_at_work": self.at_work is not None,
            "was_at_work": self.was_at_work,
        }

    def load_state_dict(self, state: dict[str, Any], *, is_under_way: bool) -> None:
        """Go on where another one stood, within an epoch where one is under way."""
        self.stop()
        # As it was, and not as policies ask for now: measuring may have stopped within the epoch.
        if is_under_way and state["is_at_work"] and self.estimator is not None:
            self.estimator.start()
            self._tell()
            self.at_work = self.estimator
            self.at_work.load_state_dict(state["estimator"])
        self.was_at_work = state["was_at_work"]
