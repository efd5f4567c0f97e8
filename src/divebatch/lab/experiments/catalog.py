"""The experiments by name: one TOML file each in `paper/`."""

from pathlib import Path

from divebatch.errors import ArgumentError
from divebatch.lab.experiments.schema import Experiment, read_experiment

FOLDER = Path(__file__).parent / "paper"


def experiment_names() -> list[str]:
    """All there are, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def get_experiment(name: str) -> Experiment:
    """The experiment called `name`, or that of a file `name.toml`; an error lists those there are."""
    if name.endswith(".toml"):
        return read_experiment(Path(name))
    if name not in experiment_names():
        known = ", ".join(experiment_names())
        raise ArgumentError(f"unknown experiment {name!r}; known: {known}, or a path to a .toml file")
    return read_experiment(FOLDER / f"{name}.toml")
