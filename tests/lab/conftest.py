import pytest

from divebatch.lab import Run
from lab.helpers import kill_after, small


@pytest.fixture
def begun(tmp_path) -> Run:
    """A run after its second of four epochs."""
    run = Run(small(), "divebatch", 0, tmp_path / "begun")
    kill_after(run, 2)
    return run
