"""Programs that end right after a collective over gloo: how often one aborts with this library's, or with torch's."""

import os
import re
import sys
from collections.abc import Iterator

from faults import exit_program
from faults.outcome import Outcome
from faults.processes import start
from faults.shop import Shop

FAULT = "rank: its program ends right after a collective"


def tries(shop: Shop) -> Iterator[Outcome]:
    pairs = shop.tries(quick=10, full=20)
    # A program of its own: forked ones leave without the interpreter's end, in which it happens.
    program = start(shop.log(), os.execv, sys.executable, [sys.executable, exit_program.__file__, str(pairs)])
    code = program.end()
    counts = re.search(r"aborted: (\d+) (\d+)", program.output)
    if counts is None:
        yield Outcome(FAULT, "hung" if code is None else "lost", program.last_words)
        return
    aborted, direct = map(int, counts.groups())
    beside = f"torch's own collectives, called directly: {direct} of {2 * pairs} processes aborted"
    yield Outcome(FAULT, "whole", beside, tries=2 * pairs - aborted)
    if aborted:
        yield Outcome(FAULT, "traceback", "aborted", tries=aborted)
