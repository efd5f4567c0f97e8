"""Checkpoints of one run put in the place of another's, which differs in one thing: each is refused by name."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from divebatch.lab import Run, get_experiment
from divebatch.lab.schema import Part
from faults.outcome import Outcome, Verdict
from faults.processes import in_child
from faults.runs import write_images
from faults.shop import Shop
from faults.small import begin, copied, resumed, small


def faster(run: Run) -> Run:
    method = replace(run.method, lr=2 * run.method.lr)
    return replace(run, experiment=replace(run.experiment, methods={**run.experiment.methods, run.method_name: method}))


def with_data(run: Run, **settings: object) -> Run:
    data = replace(run.experiment.data, settings={**run.experiment.data.settings, **settings})
    return replace(run, experiment=replace(run.experiment, data=data))


OTHERS: dict[str, Callable[[Run], Run]] = {
    "seed": lambda run: replace(run, seed=1),
    "method": lambda run: replace(run, method_name="oracle"),
    "rate": faster,
    "schedule": lambda run: replace(run, experiment=replace(run.experiment, schedule=Part(kind="constant"))),
    "optimizer": lambda run: replace(
        run, experiment=replace(run.experiment, optimizer=Part(kind="sgd", settings={"momentum": 0.9}))
    ),
    "length": lambda run: replace(run, experiment=replace(run.experiment, epochs=9)),
    "data of another size": lambda run: with_data(run, num_samples=120),
    "data of the same size": lambda run: with_data(run, noise_variance=0.2),
    "precision": lambda run: replace(run, experiment=run.experiment.with_training(precision="bf16")),
    "log of the exact diversity": lambda run: replace(run, log_exact=True),
}


def tries(shop: Shop) -> Iterator[Outcome]:
    yield from in_child(shop.log(), swapped, shop.fresh("swaps"))
    yield from in_child(shop.log(), images_swapped, shop.fresh("images"))


def swapped(folder: Path) -> Iterator[Outcome]:
    run = begin(Run(small(), "divebatch", 0, folder / "run"))
    whole = begin(replace(run, folder=folder / "whole"), epochs=run.experiment.epochs)
    for name, change in OTHERS.items():
        other = begin(replace(change(run), folder=folder / name))
        for place, what in {"checkpoint": ".ckpt", "records": ".jsonl"}.items():
            mixed = copied(run, folder / "mixed")
            shutil.copy(other.records_path.with_suffix(what), mixed.records_path.with_suffix(what))
            yield judged(f"{place} of another run", f"another {name}", *resumed(mixed, whole))


def images_swapped(folder: Path) -> Iterator[Outcome]:
    """The data themselves: other pixels in files of the same names and sizes."""
    for number in (0, 1):
        write_images(folder / str(number) / "cifar-10-batches-py", per_file=4, seed=number)
    experiment = get_experiment("cifar10", ["model.kind=resnet20"]).scaled(2)
    run = begin(Run(experiment, "sgd-small", 0, folder / "run", data_dir=folder / "0"), epochs=1)
    verdict, detail = resumed(replace(run, data_dir=folder / "1"), run)
    yield judged("checkpoint of another run", "other images", verdict, detail)


def judged(fault: str, what: str, verdict: Verdict, error: str) -> Outcome:
    """What should be refused and is taken is wrong even where the end is right."""
    difference = re.search(r"[\w. ]+ is \S+ there and \S+ (here|now)", error)
    detail = f"{what}:{difference[0] if difference else error}"
    return Outcome(fault, "mixed up" if verdict == "whole" else verdict, detail)
