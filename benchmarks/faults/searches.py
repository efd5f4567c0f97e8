"""Three processes search in one folder; one gets SIGKILL in the middle of a point.

Each point must have exactly one result, and no result may come from two processes.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator

from divebatch.lab import get_experiment
from divebatch.lab.search import Search, default_space, parse_space
from faults.outcome import Outcome
from faults.processes import LIMIT, LOOK, Command, divebatch
from faults.shop import Shop

EXPERIMENT, METHOD, EPOCHS = "synthetic-convex", "sgd-small", 10
SAMPLERS = {"grid": ([], None), "tpe": (["lr=0.1..16.0", "batch_size=32..512"], 40)}
"""What is searched over, and how many points: the paper's grid has 40."""


def tries(shop: Shop) -> Iterator[Outcome]:
    for sampler, (over, trials) in SAMPLERS.items():
        quick = (["lr=1,2,4,8,16,32"], None) if sampler == "grid" else (over, 6)
        yield one_try(shop, sampler, *(quick if shop.is_quick else (over, trials)))


def one_try(shop: Shop, sampler: str, over: list[str], trials: int | None) -> Outcome:
    fault, folder = f"search ({sampler}): SIGKILL to one of three processes", shop.fresh("search")
    experiment = get_experiment(EXPERIMENT)
    space = parse_space(over) if over else default_space(experiment, experiment.method(METHOD))
    settings = {"space": space, "epochs": EPOCHS, "sampler": sampler, "num_trials": trials}
    search = Search(experiment=experiment, method_name=METHOD, folder=folder, **settings)
    words = ["search", EXPERIMENT, "--method", METHOD, "--epochs", str(EPOCHS), "--out", str(folder)]
    words += ["--sampler", sampler, *(["--trials", str(trials)] if trials else [])]
    words += [word for each in over for word in ("--over", each)]
    workers = [divebatch(shop.log(), *words) for _ in range(3)]
    victim = kill_one(search, workers)
    if victim is None:
        return Outcome(fault, "lost", "the search ended before a process could be killed")
    struck = time.monotonic()
    for survivor in (worker for worker in workers if worker is not victim):
        code = survivor.end()
        if code is None:
            return Outcome(fault, "hung")
        if code != 0:
            return Outcome(fault, "traceback" if survivor.has_traceback else "lost", survivor.last_words)
    return judged(fault, search, workers, time.monotonic() - struck)


def kill_one(search: Search, workers: list[Command]) -> Command | None:
    """Kill the first process that has said a result, once it trains its next point."""
    deadline = time.monotonic() + LIMIT
    while all(worker.is_running for worker in workers) and time.monotonic() < deadline:
        for worker in workers:
            if results(worker) and len(search.results().tried) < search.total - 2:
                worker.kill()
                return worker
        time.sleep(LOOK)
    return None


def results(worker: Command) -> list[str]:
    lines = worker.output.splitlines()
    return [line.split("]", 1)[1] for line in lines if re.match(r"\[\d+/\d+\]", line)]


def judged(fault: str, search: Search, workers: list[Command], seconds: float) -> Outcome:
    found = Counter(str(each.point) for each in search.results().tried if each.value is not None)
    said = Counter(line for worker in workers for line in results(worker))
    lost = search.total - len(found)
    twice = [point for point, count in (found | said).items() if count > 1]
    detail = f"{search.total} points, {lost} lost, {len(twice)} done twice"
    return Outcome(fault, "lost" if lost else "mixed up" if twice else "whole", detail, seconds)
