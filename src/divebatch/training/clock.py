"""What training costs: seconds and bytes."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Cumulative seconds: of training alone, and of everything since the start. Survives a resume."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_seconds = 0.0
        self._total_before, self._started = 0.0, time.perf_counter()

    @property
    def total_seconds(self) -> float:
        """Training, evaluation, records, checkpoints."""
        return self._total_before + time.perf_counter() - self._started

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count what runs inside as training; waits for the device at both ends."""
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self.train_seconds += time.perf_counter() - started

    def state_dict(self) -> dict[str, float]:
        """Both counts."""
        return {"train_seconds": self.train_seconds, "total_seconds": self.total_seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from saved counts."""
        self.train_seconds, self._total_before = state["train_seconds"], state["total_seconds"]
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_memory_bytes(device: torch.device) -> int:
    """A GPU's peak of allocated bytes since the last call; on a CPU the process's peak resident bytes so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
