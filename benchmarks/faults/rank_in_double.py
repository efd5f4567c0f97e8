"""`divebatch` in float64, where other numbers of ranks differ by less than 1e-9: a function, and torchrun's script."""

import sys

import torch

from divebatch.__main__ import main
from divebatch.lab import ranks

RANK_TIMEOUT = 15.0
"""Seconds; a rank that is only slow on a busy machine must not be given up."""


def be_a_rank(words: list[str]) -> None:
    torch.set_num_threads(1)
    ranks.TIMEOUT = RANK_TIMEOUT
    torch.set_default_dtype(torch.float64)
    sys.argv = ["divebatch", *words]
    main()


if __name__ == "__main__":
    be_a_rank(sys.argv[1:])
