from pathlib import Path

import pytest

from divebatch.lab import get_experiment
from divebatch.lab.search import to_toml


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of an experiment that takes no time."""
    text = to_toml(get_experiment("synthetic-convex"))
    path = tmp_path_factory.mktemp("files") / "small.toml"
    path.write_text(text.replace("num_samples = 20000", "num_samples = 400").replace("= 512\n", "= 8\n"))
    return path
