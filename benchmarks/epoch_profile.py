"""Where the time of one epoch goes: what the device did, and when it had nothing to do."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

EVALUATION = "evaluation begins"
LARGEST, LONGEST = 15, 5
NAME_LENGTH = 90


class Marked:
    """Batches for evaluation; a profile shows where they are asked for, and so where training ended."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        with record_function(EVALUATION):
            return iter(self.batches)


def profiled(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What `work` did up to its evaluation, in seconds. The profiler slows the host down, hardly the GPU."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = before_evaluation(list(profiler.events() or []))
    return kernels_summary(events) if on_gpu else operators_summary(events)


def before_evaluation(events: list[Any]) -> list[Any]:
    end = min((event.time_range.start for event in events if event.name == EVALUATION), default=float("inf"))
    return [event for event in events if event.time_range.start < end]


def kernels_summary(events: list[Any]) -> dict[str, Any]:
    """Kernels and copies on the GPU; those of a CUDA graph have the number of the call that launched it."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    kernels.sort(key=lambda event: event.time_range.start)
    graphs = {event.id for event in events if event.name == "cudaGraphLaunch"}
    outside = [kernel for kernel in kernels if kernel.id not in graphs]
    gaps = idle_gaps(kernels)
    idle = sum(gap for gap, _, _ in gaps)
    return {
        "wall_seconds": seconds(wall_us(events)),
        "gpu_busy_seconds": seconds(wall_us(kernels) - idle) if kernels else None,
        "graph_launches": len(graphs),
        "kernels_outside_graphs": len(outside),
        "seconds_outside_graphs": seconds(sum(map(duration, outside))),
        "largest": largest(kernels, duration),
        "largest_outside_graphs": largest(outside, duration),
        "longest_idle": [
            {"seconds": seconds(gap), "after": before.name[:NAME_LENGTH], "before": after.name[:NAME_LENGTH]}
            for gap, before, after in sorted(gaps, key=lambda found: -found[0])[:LONGEST]
        ],
    }


def operators_summary(events: list[Any]) -> dict[str, Any]:
    """On a CPU: operators, each without those it calls."""
    return {
        "wall_seconds": seconds(wall_us(events)),
        "operator_seconds": seconds(sum(event.self_cpu_time_total for event in events)),
        "largest": largest(events, lambda event: event.self_cpu_time_total),
    }


def idle_gaps(kernels: list[Any]) -> list[tuple[float, Any, Any]]:
    """Microseconds in which nothing ran, with what ran before and after; `kernels` are in order of their start."""
    gaps, last = [], kernels[0] if kernels else None
    for kernel in kernels:
        if kernel.time_range.start > last.time_range.end:
            gaps.append((kernel.time_range.start - last.time_range.end, last, kernel))
        last = max(last, kernel, key=lambda event: event.time_range.end)
    return gaps


def largest(events: list[Any], cost: Callable[[Any], float]) -> list[dict[str, Any]]:
    costs: dict[str, list[float]] = defaultdict(list)
    for event in events:
        costs[event.name].append(cost(event))
    names = sorted(costs, key=lambda name: -sum(costs[name]))[:LARGEST]
    return [{"seconds": seconds(sum(costs[n])), "calls": len(costs[n]), "name": n[:NAME_LENGTH]} for n in names]


def wall_us(events: list[Any]) -> float:
    return max(event.time_range.end for event in events) - min(event.time_range.start for event in events)


def duration(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


def seconds(microseconds: float) -> float:
    return round(microseconds / 1e6, 5)
