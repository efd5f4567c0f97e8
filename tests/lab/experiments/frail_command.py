"""`divebatch` with a rank that something befalls in its first life, where the environment says so."""

import os
import signal

import torch

from divebatch.__main__ import main
from divebatch.lab.experiments import runner

steps = 0
after_step = runner.Saver._after_step


def befallen(saver: runner.Saver) -> None:
    """FRAIL_RANK after FRAIL_STEP steps: FRAIL is what, an "error" or the name of a signal."""
    global steps
    steps += 1
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_life and os.environ.get("FRAIL_RANK") == os.environ["RANK"] and steps == int(os.environ["FRAIL_STEP"]):
        if os.environ["FRAIL"] == "error":
            raise ValueError("the cat bit the cable")
        os.kill(os.getpid(), signal.Signals[os.environ["FRAIL"]])
    after_step(saver)


def be_frail(**changes: str) -> None:
    os.environ.update(changes)
    torch.set_num_threads(1)
    runner.Saver._after_step = befallen  # type: ignore[method-assign]


if __name__ == "__main__":
    be_frail()
    main()
