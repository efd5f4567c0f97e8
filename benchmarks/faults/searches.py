"""Two processes search on one SQLite file; one gets SIGKILL in the middle of a trial.

Each point must have exactly one result, and no result may come from two processes.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import Study, make_plan, open_study, parse_space
from faults.outcome import Outcome
from faults.processes import LIMIT, LOOK, Command, divebatch
from faults.shop import Shop

EXPERIMENT, METHOD, EPOCHS = "synthetic-convex", "sgd-small", 10
HEARTBEAT = 5
"""Seconds until a process that gives no sign of life loses its trial to another one."""
FAULT = "search: SIGKILL to one of two processes"


def tries(shop: Shop) -> Iterator[Outcome]:
    for _ in range(shop.tries(quick=1, full=2)):
        # The paper's grid has 40 points.
        yield one_try(shop, ["lr=1,2,4,8,16,32"] if shop.is_quick else [])


def one_try(shop: Shop, over: list[str]) -> Outcome:
    folder = shop.fresh("search")
    space = parse_space(over) if over else None
    plan = make_plan(get_experiment(EXPERIMENT), METHOD, folder, space=space, epochs=EPOCHS)
    words = ["search", EXPERIMENT, "--method", METHOD, "--epochs", str(EPOCHS), "--out", str(folder)]
    words += ["--heartbeat-timeout", str(HEARTBEAT), *(word for each in over for word in ("--over", each))]
    workers = [divebatch(shop.log(), *words) for _ in range(2)]
    if not workers[0].wait_for(Path(plan.url.removeprefix("sqlite:///")).exists):
        return Outcome(FAULT, "lost", workers[0].last_words)
    study = open_study(plan)
    victim = kill_one(study, workers)
    if victim is None:
        return Outcome(FAULT, "lost", "the search ended before a process could be killed")
    survivor = next(worker for worker in workers if worker is not victim)
    struck = time.monotonic()
    code = survivor.end()
    if code is None:
        return Outcome(FAULT, "hung")
    if code != 0:
        return Outcome(FAULT, "traceback" if survivor.has_traceback else "lost", survivor.last_words)
    return judged(study, workers, time.monotonic() - struck)


def kill_one(study: Study, workers: list[Command]) -> Command | None:
    """Once two trials have a result, the first process that is caught in the middle of one."""
    deadline = time.monotonic() + LIMIT
    while all(worker.is_running for worker in workers) and time.monotonic() < deadline:
        for worker in workers:
            if len(study.completed()) >= 2 and is_training(study, worker):
                worker.kill()
                return worker
        time.sleep(LOOK)
    return None


def is_training(study: Study, worker: Command) -> bool:
    names = [trial.user_attrs.get("worker", "") for trial in study.trials() if trial.state.name == "RUNNING"]
    return any(name.endswith(f":{worker.process.pid}") for name in names)


def judged(study: Study, workers: list[Command], seconds: float) -> Outcome:
    points = {str(point) for point in study.space.points()}
    results = Counter(str(trial.user_attrs["point"]) for trial in study.completed())
    again = sum("again" in trial.user_attrs for trial in study.trials())
    said = Counter(
        line.split("]", 1)[1]
        for worker in workers
        for line in worker.output.splitlines()
        if re.match(r"\[\d+/\d+\]", line)
    )
    lost = points - results.keys()
    twice = [point for point, count in (results | said).items() if count > 1]
    detail = f"{len(points)} points, {len(lost)} lost, {len(twice)} done twice, {again} given to the other process"
    return Outcome(FAULT, "lost" if lost else "mixed up" if twice else "whole", detail, seconds)
