"""What the estimates at fixed weights share: one small estimate a step or so, averaged over the epoch."""

from abc import abstractmethod
from typing import Any

from divebatch.errors import UsageError
from divebatch.estimators.average import PairAverage
from divebatch.estimators.estimator import Estimator, Scene
from divebatch.measurement import Diversity


class Stepwise(Estimator):
    """Averages pairs (tr(Sigma), ||G||^2) of single steps, each at its own weights, over an epoch.

    `decay` below 1 makes it an exponential mean over steps, debiased: 0.95 looks back some twenty steps. The interval
    comes from the scatter between steps. It also holds what the weights' way through the epoch adds, so it is rather
    too wide than too narrow. Where ranks share the batches, each estimates from what it sees, and the mean is over all.

    Where decisions come every so many steps, each sees the steps since the last one. An exponential mean goes on
    through the decisions of an epoch instead: it forgets by itself.
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        self._decay = PairAverage(decay=decay).decay
        self._average = PairAverage(decay=self._decay)
        self._scene: Scene | None = None
        self._is_on, self._was_read = False, False

    def bind(self, scene: Scene) -> None:
        """Look the model over; raise here if it cannot be measured."""
        if self._scene is not None:
            raise UsageError("this estimator belongs to another controller already: make one for each")
        self._prepare(scene)
        self._scene = scene

    def start(self) -> None:
        """Attach, with nothing seen."""
        self._was_read = False
        self._attach(self._bound())
        self._forget()
        self._is_on = True

    def restart(self) -> None:
        """Forget what was seen."""
        if self._is_on:
            self.close()
            self.start()

    def window(self) -> Diversity:
        """The means since the last call, or since the start; go on measuring."""
        self._was_read = True
        seen = self._seen()
        if self._decay == 1:
            self._forget()
        return seen

    def finish(self) -> Diversity:
        """The means over the epoch, or since the last window; then detach."""
        diversity = self._seen()
        self.close()
        return diversity

    def _seen(self) -> Diversity:
        average = self._of_all_ranks()
        if not average.is_empty:
            return average.diversity()
        # A few steps may show nothing, a last batch of one sample for instance; a whole epoch should have.
        return average.unknown() if self._was_read else self._when_empty()

    def close(self) -> None:
        """Detach."""
        if self._is_on:
            self._detach()
        self._is_on = False

    def state_dict(self) -> dict[str, Any]:
        """The sums, if an epoch is being measured."""
        if not self._is_on:
            return {}
        return {"average": self._of_all_ranks().state_dict(), "was_read": self._was_read, **self._own_state()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Sums of another model are refused."""
        if state:
            self._check_own_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums; of ranks that see different samples the first takes them over."""
        if state:
            self._load_own_state(state)
            self._was_read = state.get("was_read", False)
            if self.sees_all_ranks or self._bound().ranks.is_first:
                self._average.load_state_dict(state["average"])

    def _of_all_ranks(self) -> PairAverage:
        ranks = self._bound().ranks
        return self._average if self.sees_all_ranks or ranks.is_alone else self._average.over(ranks)

    def _bound(self) -> Scene:
        if self._scene is None:
            raise UsageError("this estimator belongs to no controller yet: bind() comes first")
        return self._scene

    def _forget(self) -> None:
        self._average = self._new_average()

    def _new_average(self) -> PairAverage:
        return PairAverage(decay=self._decay)

    @abstractmethod
    def _prepare(self, scene: Scene) -> None: ...

    @abstractmethod
    def _attach(self, scene: Scene) -> None: ...

    @abstractmethod
    def _detach(self) -> None: ...

    @abstractmethod
    def _when_empty(self) -> Diversity: ...

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        return None

    def _load_own_state(self, state: dict[str, Any]) -> None:
        return None
