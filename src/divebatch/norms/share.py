"""Which share of its batch the backward pass under way is, where a batch is cut into parts."""

from collections.abc import Iterator
from contextlib import contextmanager

_share = 1.0  # of the process, not of the thread: a GPU's backward pass ends in a thread of its own


@contextmanager
def part_of_batch(share: float) -> Iterator[None]:
    """Inside, the loss that is differentiated is a micro-batch's mean times `share`, its part of the whole batch."""
    global _share
    outer, _share = _share, share
    try:
        yield
    finally:
        _share = outer


def current_share() -> float:
    """1.0 unless a batch is being cut up."""
    return _share
