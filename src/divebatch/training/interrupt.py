"""SIGTERM and Ctrl-C as a wish that is honoured after the step under way."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Inside, a signal sets `is_set`; a second Ctrl-C interrupts at once, as if nobody listened."""

    def __init__(self) -> None:
        self.is_set, self._was_interrupted = False, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            raise KeyboardInterrupt
        self._was_interrupted = self._was_interrupted or number == signal.SIGINT
        self.is_set = True
