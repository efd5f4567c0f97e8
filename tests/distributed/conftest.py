from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four ranks."""
    started = RankPool(4, Path(tmp_path_factory.mktemp("group")))
    yield started
    started.close()
