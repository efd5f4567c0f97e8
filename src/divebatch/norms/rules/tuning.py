"""Which of several kernels is fastest on a shape: measured once, remembered."""

import time
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

Kernel = Callable[[slice], Tensor]

NUM_CALLS = 4
"""The first one pays for set-up, and of the rest the quickest counts: other programs only ever slow one down."""

# A cache for the process: measuring takes a while, and the answer holds for all models on the same device.
_CHOSEN: dict[Hashable, str] = {}


def fastest(kernels: Mapping[str, Kernel], samples: slice, *, key: Hashable) -> Kernel:
    """The kernel that was fastest on these samples when the key was first met; the first one inside a compiler."""
    if torch.compiler.is_compiling():
        return next(iter(kernels.values()))
    if key not in _CHOSEN:
        _CHOSEN[key] = min(kernels, key=lambda name: _seconds(kernels[name], samples))
    return kernels[_CHOSEN[key]]


def _seconds(kernel: Kernel, samples: slice) -> float:
    times = []
    for _ in range(NUM_CALLS):
        started = time.perf_counter()
        result = kernel(samples)
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
