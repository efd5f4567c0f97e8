"""Who hears of each batch that a loop comes for."""

from collections.abc import Callable

from divebatch.data.epoch_progress import EpochProgress
from divebatch.errors import UsageError

Listener = Callable[[EpochProgress], None]


class Listeners:
    """Those that are told before a batch is fetched; one of them may be a controller, which sets the batch size."""

    def __init__(self) -> None:
        self._all: list[Listener] = []
        self._controller: Listener | None = None

    def add(self, listener: Listener, *, controls: bool) -> Callable[[], None]:
        """Tell `listener` from now on; returns what ends that. Only one may control."""
        if controls:
            self.require_no_controller()
        self._all.append(listener)
        self._controller = listener if controls else self._controller
        return lambda: self._remove(listener)

    def require_no_controller(self) -> None:
        """Raise if there is one."""
        if self._controller is not None:
            raise UsageError(
                "this loader has a Controller already, and two would set its batch size in turn: close() the first one "
                "(or leave its with block) before you make another, or make a loader for each"
            )

    def _remove(self, listener: Listener) -> None:
        if listener in self._all:
            self._all.remove(listener)
        if listener is self._controller:
            self._controller = None

    def tell(self, current: EpochProgress) -> None:
        """The loop has come for its next batch."""
        for listener in list(self._all):
            listener(current)
