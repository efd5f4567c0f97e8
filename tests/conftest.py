"""Settings of all tests. The twins are imported as `reference.per_sample`."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("divebatch", deadline=None, derandomize=True)
settings.load_profile("divebatch")
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Before anything imports triton: its interpreter then runs the kernels, which touches nothing else.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """What is there by now stays. Each controller looks for schedulers among all objects that are not frozen."""
    gc.collect()
    gc.freeze()
