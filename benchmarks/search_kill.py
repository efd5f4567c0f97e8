"""Two processes search the paper's grid on one SQLite file; one is killed -9 in the middle of a trial.

Prints what became of every point: each must have exactly one result, and no result may come from two processes.

    python benchmarks/search_kill.py --epochs 3
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import Plan, Study, make_plan, open_study, parse_space

EXPERIMENT, METHOD = "synthetic-convex", "sgd-small"


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        plan, words = plan_in(Path(folder), arguments)
        began = time.perf_counter()
        workers = [start(words, Path(folder) / f"worker-{number}.txt") for number in (0, 1)]
        study = wait_for_study(plan, workers)
        victim = kill_one(study, workers, after=arguments.kill_after)
        survivor = next(worker for worker in workers if worker is not victim)
        code = survivor.wait(timeout=arguments.timeout)
        print(f"{time.perf_counter() - began:.0f} s; the survivor ended with {code}")
        sys.exit(judge(study, Path(folder)) or code)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--over", action="append", help="as `divebatch search` takes it; the paper's grid by default")
    parser.add_argument("--kill-after", type=int, default=10, help="trials with a result before the kill")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds")
    return parser.parse_args()


def plan_in(folder: Path, arguments: argparse.Namespace) -> tuple[Plan, list[str]]:
    over = arguments.over or []
    space = parse_space(over) if over else None
    plan = make_plan(get_experiment(EXPERIMENT), METHOD, folder, space=space, epochs=arguments.epochs)
    words = ["search", EXPERIMENT, "--method", METHOD, "--epochs", str(arguments.epochs), "--out", str(folder)]
    words += [
        "--heartbeat-timeout",
        str(arguments.heartbeat_timeout),
        *(word for each in over for word in ("--over", each)),
    ]
    return plan, words


def start(words: list[str], output: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "divebatch", *words], stdout=file, stderr=file, env=environment)


def wait_for_study(plan: Plan, workers: list["subprocess.Popen[bytes]"]) -> Study:
    database = Path(plan.url.removeprefix("sqlite:///"))
    while not database.exists():
        require_alive(workers)
        time.sleep(0.1)
    return open_study(plan)


def kill_one(study: Study, workers: list["subprocess.Popen[bytes]"], *, after: int) -> "subprocess.Popen[bytes]":
    """Once `after` trials have a result, the first process that is caught in the middle of one."""
    while True:
        for worker in workers:
            if len(study.completed()) >= after and is_training(study, worker):
                worker.kill()
                worker.wait()
                where = "in a trial" if is_training(study, worker) else "between two trials: run this again"
                print(f"killed process {worker.pid} after {len(study.completed())} results, {where}")
                return worker
        require_alive(workers)
        time.sleep(0.02)


def is_training(study: Study, worker: "subprocess.Popen[bytes]") -> bool:
    names = [trial.user_attrs.get("worker", "") for trial in study.trials() if trial.state.name == "RUNNING"]
    return any(name.endswith(f":{worker.pid}") for name in names)


def require_alive(workers: list["subprocess.Popen[bytes]"]) -> None:
    if any(worker.poll() is not None for worker in workers):
        sys.exit("a process ended before it could be killed: lower --kill-after or raise --epochs")


def judge(study: Study, folder: Path) -> int:
    """0 where every point has one result and one process that said so (or was killed while it did)."""
    points = {str(point) for point in study.space.points()}
    results = Counter(str(trial.user_attrs["point"]) for trial in study.completed())
    states = Counter(trial.state.name for trial in study.trials())
    again = [trial for trial in study.trials() if "again" in trial.user_attrs]
    said = Counter(
        line.split("]", 1)[1]
        for output in folder.glob("worker-*.txt")
        for line in output.read_text().splitlines()
        if re.match(r"\[\d+/\d+\]", line)
    )
    lost, twice = points - results.keys(), [point for point, count in results.items() if count > 1]
    said_twice = [line for line, count in said.items() if count > 1]
    print(f"{len(points)} points: {sum(results.values())} results, {len(lost)} lost, {len(twice)} done twice")
    print(f"trials by state: {dict(states)}; given back to others: {len(again)}; said by two: {len(said_twice)}")
    by_worker = Counter(trial.user_attrs["worker"].rsplit(":", 1)[1] for trial in study.completed())
    print(f"results by process: {dict(by_worker)}")
    return int(bool(lost or twice or said_twice or not again))


if __name__ == "__main__":
    main()
