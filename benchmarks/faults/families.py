"""What is tried: a family is a file with a function `tries`, and a row here."""

from collections.abc import Callable, Iterator

from faults import damage, disk, exits, hostile, ranks, reports, runs, searches, swaps, workers
from faults.outcome import Outcome
from faults.shop import Shop

FAMILIES: dict[str, Callable[[Shop], Iterator[Outcome]]] = {
    "runs": runs.tries,
    "workers": workers.tries,
    "ranks": ranks.tries,
    "exits": exits.tries,
    "searches": searches.tries,
    "reports": reports.tries,
    "swaps": swaps.tries,
    "damage": damage.tries,
    "disk": disk.tries,
    "hostile": hostile.tries,
}
