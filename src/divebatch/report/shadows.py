"""What policies that only watched would have chosen: one chart for each method whose runs have shadows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np

from divebatch.report.charts import TRIAL_NOTE, Chart, Track
from divebatch.report.curves import average_curve
from divebatch.report.panels import size_panel
from divebatch.report.plot import Line
from divebatch.report.runs import Run
from divebatch.report.style import SHADOW_LOOKS, Look

IN_FORCE = 3.5
WIDEST, THINNEST = 2.0, 1.0
"""In points: shadows often agree, and each is thinner than the one before, so that all are seen."""
NOTE = (
    "Solid: the batch size in force. The others: what each shadow would have put in force there, decided after the "
    "epoch before, from the size and the weights that training then had."
)


def make_shadow_charts(tracks: Sequence[Track]) -> list[Chart]:
    """None for methods whose runs have no shadows, or no epoch after the first."""
    charts: list[Chart] = []
    for track in tracks:
        wishes = list(_wishes(track))
        if wishes:
            charts.append(_chart(f"shadows{len(charts) + 1}", track, wishes))
    return charts


def _chart(name: str, track: Track, wishes: Sequence[Line]) -> Chart:
    in_force = average_curve(track.runs, "batch_size").measured()
    driver = Line(f"{track.method}, in force", replace(track.look, dashes="solid"), in_force, width=IN_FORCE)
    widths = np.linspace(WIDEST, THINNEST, len(wishes)).tolist()
    wishes = [replace(line, width=width) for line, width in zip(wishes, widths, strict=True)]
    panel = replace(
        size_panel([driver, *wishes]),
        title=f"Batch size wanted (samples), {track.method} driving",
        spread="standard_error",
    )
    return Chart(name, panel, [track] * len(panel.lines), f"{NOTE} {TRIAL_NOTE}")


def _wishes(track: Track) -> Iterator[Line]:
    """One line a shadow, in the order of the records."""
    looks = cycle([look for look in SHADOW_LOOKS if look[0] != track.look.color])
    names = dict.fromkeys(name for run in track.runs for record in run.epochs for name in record.shadows or {})
    for name, look in zip(names, looks, strict=False):
        curve = average_curve([_as_if_driven(run, name) for run in track.runs], "batch_size")
        if not curve.is_empty:
            yield Line(name, Look(name, *look), curve)


def _as_if_driven(run: Run, name: str) -> Run:
    """The epochs for which the shadow had a wish, with that as their batch size."""
    wished = [
        replace(record, batch_size=before.shadows[name])
        for before, record in pairwise(run.epochs)
        if before.shadows and name in before.shadows and record.epoch == before.epoch + 1
    ]
    return replace(run, epochs=tuple(wished))
