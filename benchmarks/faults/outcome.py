"""What became of one try."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["whole", "refused", "lost", "mixed up", "hung", "traceback"]
MEANINGS: dict[Verdict, str] = {
    "whole": "in the end all is as if nothing had happened: the same bits, or with other ranks the same course",
    "refused": "an error said what is wrong, nothing was executed, and no file was changed",
    "lost": "a run, a result or a report could not be continued or repaired",
    "mixed up": "something wrong was taken for right",
    "hung": "a process did not end within its time limit",
    "traceback": "a process ended with a traceback, or with nothing said",
}
FATAL: tuple[Verdict, ...] = ("lost", "mixed up", "hung")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One try.

    Args:
        fault: What was done to what; tries of the same fault make a row of the table.
        verdict: What became of it, as `MEANINGS` has it.
        detail: Where it struck, or what was said.
        seconds: How long it took until the last process that was left had ended, where that counts.
        tries: How many alike this stands for.
    """

    fault: str
    verdict: Verdict
    detail: str = ""
    seconds: float | None = None
    tries: int = 1


def worst(*verdicts: Verdict) -> Verdict:
    """The one that counts where several parts of a try are judged."""
    order: list[Verdict] = ["lost", "mixed up", "hung", "traceback", "refused", "whole"]
    return min(verdicts, key=order.index)
