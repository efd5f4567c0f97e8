"""Time and peak memory of a training step that measures per-sample gradient norms, as ratios to the plain step.

Every method runs the same model on the same batch in one process, interleaved; the median over repeats counts. Peers
(BackPACK, Opacus, torch.func) take part where they are installed and can do the model at all.

    python benchmarks/norms.py --device cpu
    python benchmarks/norms.py --device cuda --compiled --rows "ResNet-18 BatchNorm" --batches 128,2048
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from divebatch.norms import DiversityMeter, NormMeter
from models import PROBLEMS, Problem
from peers import PEERS

Step = Callable[[], None]


class Setting:
    """One model on one batch, in one precision."""

    def __init__(self, name: str, batch_size: int, device: str, precision: str, compiled: bool) -> None:
        self.problem: Problem = PROBLEMS[name]
        self.device, self.compiled, self.precision = device, compiled, precision
        torch.manual_seed(0)
        self.inputs, self.targets = (tensor.to(device) for tensor in self.problem.data(batch_size))
        self.channels_last = precision == "bf16" and self.inputs.ndim == 4
        if self.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.problem.build().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def step(self, model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        cast = torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()

        def step() -> None:
            optimizer.zero_grad()
            with cast:
                loss = self.problem.loss(run(self.inputs), self.targets)
            loss.backward()
            optimizer.step()

        return step


def plain(setting: Setting) -> Step:
    model = setting.model()
    return setting.step(model, torch.compile(model) if setting.compiled else model)


def metered(kind: type, **settings: object) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        model = setting.model()
        meter = kind(model, compiled=setting.compiled, **settings)
        meter.attach()
        return setting.step(model, torch.compile(model) if setting.compiled else model)

    return build


METHODS: dict[str, Callable[[Setting], Step]] = {
    "exact": metered(NormMeter),
    "sketch": metered(NormMeter, mode="sketch"),
    "sketch every=8": metered(NormMeter, mode="sketch", every=8),
    "exact + gradient sum": metered(DiversityMeter),
}


def seconds(step: Step, device: str, calls: int) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    started = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - started) / calls


def measure(setting: Setting, builders: dict[str, Callable[[Setting], Step]], repeats: int) -> dict[str, dict]:
    """For each method: median time ratio to the plain step of the same round, and the ratio of peak memory."""
    results: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    for name, build in {"plain": plain, **builders}.items():
        try:
            step = build(setting)
            for _ in range(8 if setting.device == "cuda" else 2):
                step()
            steps[name] = step
        except Exception as error:  # a peer that cannot do this model says so in its own way
            results[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:100]}"}
    times: dict[str, list[float]] = {name: [] for name in steps}
    calls = 8 if setting.device == "cuda" else 1 + int(0.05 / seconds(steps["plain"], "cpu", 1))  # outlast cold caches
    for _ in range(repeats):
        for name, step in steps.items():
            step()
            times[name].append(seconds(step, setting.device, calls))
    peaks = {name: peak_bytes(step) if setting.device == "cuda" else 0 for name, step in steps.items()}
    for name in steps:
        ratio = statistics.median(m / p for m, p in zip(times[name], times["plain"], strict=True))
        results[name] = {"time": round(ratio, 3), "ms": round(1000 * statistics.median(times[name]), 3)}
        if peaks["plain"]:
            results[name]["memory"] = round(peaks[name] / peaks["plain"], 3)
    return results


def peak_bytes(step: Step) -> int:
    """Beyond what lies there between steps of both loops."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", default="logistic regression,MLP,ResNet-20 BatchNorm,ResNet-20 GroupNorm")
    parser.add_argument("--batches", default="128")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--methods", default=",".join([*METHODS, *PEERS]))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    builders = {**METHODS, **({} if options.compiled else PEERS)}
    chosen = {name: builders[name] for name in options.methods.split(",") if name in builders}
    print(json.dumps({"torch": torch.__version__, "device": options.device, "repeats": options.repeats}), flush=True)
    for row in options.rows.split(","):
        for batch_size in map(int, options.batches.split(",")):
            torch.compiler.reset()
            setting = Setting(row, batch_size, options.device, options.precision, options.compiled)
            shape = {"row": row, "batch": batch_size, "precision": options.precision, "compiled": options.compiled}
            for name, result in measure(setting, chosen, options.repeats).items():
                print(json.dumps({**shape, "method": name, **result}), flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
