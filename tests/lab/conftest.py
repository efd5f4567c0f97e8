import pytest

from divebatch.lab import Run, execute
from divebatch.records import EpochRecord
from lab.helpers import small


class StopHereError(Exception):
    pass


@pytest.fixture
def begun(tmp_path) -> Run:
    """A run after its second of four epochs."""
    run = Run(small(), "divebatch", 0, tmp_path)

    def stop(record: EpochRecord) -> None:
        if record.epoch == 2:
            raise StopHereError

    with pytest.raises(StopHereError):
        execute(run, on_epoch=stop)
    return run
