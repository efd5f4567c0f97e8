"""The costs of training: seconds and bytes."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LAPS = ("train", "measure", "evaluate", "compile")


class Clock:
    """A clock of cumulative seconds, in total and by kind of work, which survives a resume.

    A lap within a lap pauses the outer lap, so that no second counts twice.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._laps = dict.fromkeys(LAPS, 0.0)
        self._running: list[str] = []
        self._since = time.perf_counter()
        self._total_before, self._started = 0.0, self._since

    @property
    def train_seconds(self) -> float:
        """Seconds of steps, measuring and deciding, without evaluation and compilation."""
        return self.seconds("train") + self.seconds("measure")

    @property
    def total_seconds(self) -> float:
        """Seconds of training, compilation, evaluation, records and checkpoints."""
        return self._total_before + time.perf_counter() - self._started

    def seconds(self, name: str) -> float:
        """Return the seconds of all laps of this name, including a running lap."""
        is_running = bool(self._running) and self._running[-1] == name
        return self._laps[name] + (time.perf_counter() - self._since if is_running else 0.0)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`; wait for the device at both ends."""
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        """Credit the time since the last turn to the running lap."""
        if self.device.type == "cuda":
            # Kernels run on after their launch: without waiting, their time would count for a later lap.
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._running:
            self._laps[self._running[-1]] += now - self._since
        self._since = now

    def state_dict(self) -> dict[str, float]:
        return {**{name: self.seconds(name) for name in LAPS}, "total": self.total_seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._laps = {name: state[name] for name in LAPS}
        self._total_before, self._started = state["total"], time.perf_counter()
        self._since = self._started


def forget_peak_memory(device: torch.device) -> None:
    """Reset the device's memory peak; a CPU cannot reset its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return a GPU's peak of allocated bytes since `forget_peak_memory`, or a CPU process's peak resident bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage counts in bytes on macOS and in kibibytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
