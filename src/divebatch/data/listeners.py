"""Who wants to be told."""

from collections.abc import Callable
from typing import Any


class Listeners:
    """Functions that are called together.

    >>> listeners = Listeners()
    >>> forget = listeners.add(print)
    >>> listeners("hear")
    hear
    >>> forget()
    >>> listeners("nobody hears this")
    """

    def __init__(self) -> None:
        self._all: list[Callable[..., None]] = []

    def add(self, listener: Callable[..., None]) -> Callable[[], None]:
        """Returns what takes `listener` off again; the second time it has no effect."""
        self._all.append(listener)

        def forget() -> None:
            self._all = [other for other in self._all if other is not listener]

        return forget

    def __call__(self, *told: Any) -> None:
        """Tell them."""
        for listener in list(self._all):
            listener(*told)
