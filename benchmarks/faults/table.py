"""The table of faults, tries and outcomes: the only place that prints."""

from collections import Counter
from collections.abc import Sequence

from faults.outcome import FATAL, MEANINGS, Outcome


def show_try(outcome: Outcome) -> None:
    """One line, as soon as it is known; what was refused, file by file, is counted only."""
    if outcome.verdict == "refused":
        return
    seconds = "" if outcome.seconds is None else f" ({outcome.seconds:.1f} s)"
    count = f"{outcome.tries:5} x " if outcome.tries > 1 else " " * 8
    print(f"{count}{outcome.verdict:>9}  {outcome.fault}{seconds}  {outcome.detail}".rstrip(), flush=True)


def show_table(outcomes: Sequence[Outcome]) -> None:
    """A row for each fault; the verdicts that must not be last."""
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.fault, []).append(outcome)
    by_fault["all"] = list(outcomes)
    rows = [["fault", "tries", *MEANINGS, "slowest"], *(_row(name, alike) for name, alike in by_fault.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
    for verdict, meaning in MEANINGS.items():
        print(f"{verdict}: {meaning}")


def is_bad(outcomes: Sequence[Outcome]) -> bool:
    """Whether anything was lost, mixed up or hung."""
    return any(outcome.verdict in FATAL for outcome in outcomes)


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts[outcome.verdict] += outcome.tries
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    slowest = f"{max(seconds):.1f} s" if seconds else ""
    return [name, str(counts.total()), *(str(counts[verdict] or "-") for verdict in MEANINGS), slowest]
