"""The quantities that figures show, each with the axis it needs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from divebatch.report.plot import Line, Panel


def loss_panel(lines: Sequence[Line]) -> Panel:
    """Validation loss."""
    lowest = min((float(np.nanmin(line.curve.mean)) for line in lines), default=0.0)
    # Most losses cannot be negative, but some can.
    return Panel("Validation loss", lines, bounds=(0.0 if lowest >= 0 else -np.inf, np.inf))


def accuracy_panel(lines: Sequence[Line]) -> Panel:
    """Validation accuracy in percent; the lines hold it from 0 to 1."""
    in_percent = [replace(line, curve=line.curve.scaled(100.0)) for line in lines]
    return Panel("Validation accuracy (%)", in_percent, bounds=(0.0, 100.0), may_be_log=False)


def size_panel(lines: Sequence[Line]) -> Panel:
    """Batch size in samples."""
    return Panel("Batch size (samples)", lines, bounds=(1.0, np.inf), log_base=2)
