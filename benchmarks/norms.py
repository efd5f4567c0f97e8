"""Time and peak memory of a training step that measures per-sample gradient norms, as ratios to the plain step.

A row is a network and a batch size, NAME@BATCH. Every method runs the same model on the same batch in one process, in
turns with the step it is compared with; the median over rounds counts. Peers (BackPACK, Opacus, torch.func) take part
in eager rows with --peers, where they are installed and can do the model at all. Each result is written when it is
there: what a time limit cuts off is only the rest.

    python benchmarks/norms.py --peers
    python benchmarks/norms.py --device cuda --precision bf16 --kinds compiled --rows "ResNet-18 BatchNorm@2048,GPT@16"
    python benchmarks/norms.py --device cuda --precision bf16 --kinds graphs --rows "ResNet-18 BatchNorm@128"
"""

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from peers import PEERS
from steps import KINDS, METHODS, PLAIN, Built, Method, Setting, Step

ROWS = "logistic regression@128,MLP@128,ResNet-20 BatchNorm@128,ResNet-20 GroupNorm@128"
Methods = dict[str, Method | Built]


def seconds(step: Step, setting: Setting, calls: int) -> float:
    if setting.device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    started = setting.clock()
    for _ in range(calls):
        step()
    return (setting.clock() - started) / calls


def warm_up(method: Method | Built, setting: Setting) -> float:
    """Seconds until the first steps are over: compiling, and choosing kernels."""
    started = time.perf_counter()
    with method.running(setting) as step:
        for _ in range(8 if setting.device == "cuda" else 2):
            step()
        if setting.device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - started


def timed(method: Method | Built, setting: Setting, calls: int) -> float:
    with method.running(setting) as step:
        step()
        return seconds(step, setting, calls)


def compare(method: Method | Built, base: Method | Built, setting: Setting, repeats: int) -> dict[str, object]:
    """Median, least and greatest of the rounds' time ratios to `base`, and the ratio of peak memory."""
    least = 8 if setting.device == "cuda" else 1 + int(0.05 / timed(PLAIN, setting, 1))  # outlast cold caches
    times = [(timed(base, setting, least), timed(method, setting, least)) for _ in range(repeats)]
    ratios = [ours / theirs for theirs, ours in times]
    result: dict[str, object] = {
        "time": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ms": round(1000 * statistics.median(ours for _, ours in times), 3),
        "base_ms": round(1000 * statistics.median(theirs for theirs, _ in times), 3),
    }
    if setting.device == "cuda":
        result["memory"] = round(peak_bytes(method, setting) / peak_bytes(base, setting), 3)
    return result


def peak_bytes(method: Method | Built, setting: Setting) -> int:
    """Of a step that measures, beyond what lies there between steps. A replayed graph's own memory is not seen."""
    with method.running(setting) as step:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(setting: Setting, methods: Methods, repeats: int, turn: Path | None) -> Iterator[dict[str, object]]:
    """One result a method, as soon as it is there."""
    known: Methods = {"plain": PLAIN, **METHODS}
    usable = {name: method for name, method in methods.items() if method.can_do(setting)}
    with locked(turn, fcntl.LOCK_SH):
        warm = {name: tried(warm_up, method, setting) for name, method in {"plain": PLAIN, **usable}.items()}
    with locked(turn, fcntl.LOCK_EX):
        for name, method in usable.items():
            result = warm[name]
            if not isinstance(result, dict):
                result = {**tried(compare, method, known[method.base], setting, repeats), "warm_up_s": round(result, 1)}
            yield {"method": name, "base": method.base, **result}


def tried(work: Callable[..., Any], *arguments: Any) -> Any:
    """Its result, or what went wrong: a peer that cannot do a model says so in its own way."""
    try:
        return work(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()[:100]}"}


@contextmanager
def locked(path: Path | None, kind: int) -> Iterator[None]:
    """Inside, this process has its turn."""
    with nullcontext() if path is None else path.open("a") as file:
        if file is not None:
            fcntl.flock(file, kind)
        yield


def main() -> None:
    options = arguments()
    torch.set_float32_matmul_precision("high")
    if options.processor_time:
        torch.set_num_threads(1)
    table: dict[str, dict[str, object]] = {}
    about = {"torch": torch.__version__, "device": options.device, "threads": torch.get_num_threads()}
    say(options.out, {**about, "repeats": options.repeats, "processor_time": options.processor_time})
    for kind in options.kinds.split(","):
        peers: Methods = {name: Built(build) for name, build in PEERS.items()}
        known: Methods = {**METHODS, **(peers if options.peers and kind == "eager" else {})}
        chosen = known if options.methods is None else {name: known[name] for name in options.methods.split(",")}
        for row in options.rows.split(","):
            name, _, batch_size = row.partition("@")
            shape = {"row": name, "batch": int(batch_size), "precision": options.precision, "kind": kind}
            torch.compiler.reset()
            setting = Setting(name, int(batch_size), options.device, options.precision, kind)
            setting.clock = time.process_time if options.processor_time else time.perf_counter
            for result in measure(setting, chosen, options.repeats, options.turn):
                say(options.out, {**shape, **result})
                table.setdefault(f"{row} {kind}", {})[str(result["method"])] = result.get("time", "-")
            del setting
            if options.device == "cuda":
                torch.cuda.empty_cache()
    show(table)


def show(table: dict[str, dict[str, object]]) -> None:
    """Time ratios, a row a network; "-" where a peer cannot do it."""
    methods = list(dict.fromkeys(method for row in table.values() for method in row))
    print("\n| network@batch, kind |", " | ".join(methods), "|")
    print("|" + "---|" * (1 + len(methods)))
    for name, row in table.items():
        print(f"| {name} |", " | ".join(str(row.get(method, "")) for method in methods), "|")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", default=ROWS, help="NAME@BATCH,NAME@BATCH; names are in benchmarks/models.py")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="bf16 is channels_last too")
    parser.add_argument("--kinds", default="eager", help=f"of {', '.join(KINDS)} (compiled, and replayed on a GPU)")
    parser.add_argument("--methods", help=f"of {', '.join(METHODS)}, and the peers; all by default")
    parser.add_argument("--peers", action="store_true", help="other libraries too, in eager rows")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread's own time: for a CPU that others use meanwhile"
    )
    parser.add_argument(
        "--turn", type=Path, help="a file by which processes of one machine compile at once and time alone"
    )
    parser.add_argument("--out", type=Path, help="a file to which results are appended, beside the screen")
    return parser.parse_args()


def say(path: Path | None, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
