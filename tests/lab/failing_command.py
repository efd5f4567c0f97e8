"""`divebatch` with a rank that fails before its launcher has started it anew, where the environment says so."""

import os
import signal
import time

import torch

from divebatch.__main__ import main
from divebatch.lab.runs import _Keeper

steps = 0
after_step = _Keeper._after_step


def failing(saver: _Keeper) -> None:
    """Rank FAILING_RANK fails after FAILING_STEP steps; FAILURE is how: "error", "sleep", or the name of a signal."""
    global steps
    steps += 1
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if (
        is_first_start
        and os.environ.get("FAILING_RANK") == os.environ["RANK"]
        and steps == int(os.environ["FAILING_STEP"])
    ):
        if os.environ["FAILURE"] == "error":
            raise ValueError("the cat bit the cable")
        if os.environ["FAILURE"] == "sleep":
            time.sleep(1000.0)
        os.kill(os.getpid(), signal.Signals[os.environ["FAILURE"]])
    after_step(saver)


def make_fail(**changes: str) -> None:
    os.environ.update(changes)
    torch.set_num_threads(1)
    _Keeper._after_step = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    make_fail()
    main()
