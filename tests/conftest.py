"""Settings of all tests. The twins are imported as `reference.per_sample`."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("divebatch", deadline=None, derandomize=True)
settings.load_profile("divebatch")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """For modules with hundreds of controllers: each looks for schedulers among all objects that are not frozen."""
    gc.freeze()
    yield
    gc.unfreeze()
