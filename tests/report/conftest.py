from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def figures_of_one_word() -> Iterator[None]:
    """For tests of what lies around the figures: matplotlib takes most of a report's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("divebatch.report.drawing._bytes", lambda figure, kind: kind.encode())
        yield


@pytest.fixture
def quick_figures() -> Iterator[None]:
    with figures_of_one_word():
        yield


@pytest.fixture(scope="module")
def quick_figures_of_module() -> Iterator[None]:
    with figures_of_one_word():
        yield
