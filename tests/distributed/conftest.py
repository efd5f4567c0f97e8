from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.team import Team


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Four ranks."""
    started = Team(4, Path(tmp_path_factory.mktemp("group")))
    yield started
    started.close()
