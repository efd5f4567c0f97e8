"""`divebatch`, resting after each step, with a rank that dies in its first life where the environment says so."""

import os
import signal
import time

import torch

from divebatch.__main__ import main
from divebatch.experiments import runner

steps = 0
after_step = runner.Saver._after_step


def rested(saver: runner.Saver) -> None:
    """FRAIL_RANK after FRAIL_STEP steps: FRAIL is how, "error" or "kill"."""
    global steps
    steps += 1
    time.sleep(float(os.environ.get("FRAIL_NAP", "0")))
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_life and os.environ.get("FRAIL_RANK") == os.environ["RANK"] and steps == int(os.environ["FRAIL_STEP"]):
        if os.environ["FRAIL"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cat bit the cable")
    after_step(saver)


def be_frail(**changes: str) -> None:
    os.environ.update(changes)
    torch.set_num_threads(1)
    runner.Saver._after_step = rested  # type: ignore[method-assign]


if __name__ == "__main__":
    be_frail()
    main()
