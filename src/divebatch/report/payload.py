"""The numbers that the page's script draws, as JSON that is safe inside a page."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from divebatch.report.charts import AXES, Chart, Track
from divebatch.report.plot import Line
from divebatch.report.sections import Section
from divebatch.report.style import Dashes

DIGITS = 5
"""Significant ones: more than a screen shows."""


def payload(sections: Sequence[Section]) -> str:
    """One JSON object, without any character that could end the element that holds it."""
    labels = {name: label for name, (_, label) in AXES.items()}
    data = {"axes": labels, "sections": [_section(section) for section in sections]}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section) -> dict[str, Any]:
    place = {track.method: number for number, track in enumerate(section.tracks)}
    return {
        "methods": [_method(track) for track in section.tracks],
        "charts": [_chart(chart, place) for chart in section.charts],
    }


def _method(track: Track) -> dict[str, Any]:
    return {
        "name": track.method,
        "color": track.look.color,
        "dark": track.look.dark_color,
        "x": {axis: _rounded(values) for axis, values in track.axes.items()},
    }


def _chart(chart: Chart, place: dict[str, int]) -> dict[str, Any]:
    low, high = chart.panel.bounds
    return {
        "title": chart.panel.title,
        "log": chart.panel.is_log,
        "base": chart.panel.log_base,
        "bounds": _rounded((low, high)),
        "lines": [
            {"method": place[track.method], **_line(track, line)}
            for track, line in zip(chart.tracks, chart.panel.lines, strict=True)
        ],
    }


def _line(track: Track, line: Line) -> dict[str, Any]:
    own = {"color": line.look.color, "dark": line.look.dark_color} if line.look.color != track.look.color else {}
    return {
        **own,
        "label": line.label,
        "dash": _dash(line.look.dashes),
        "width": line.width,
        "at": np.searchsorted(track.epochs, line.curve.epochs).tolist(),
        "mean": _rounded(line.curve.mean),
        "error": _rounded(line.curve.standard_error),
    }


def _dash(dashes: Dashes) -> list[float]:
    """In pixels, dash and gap in turn; empty for a solid line."""
    return [] if dashes == "solid" else [2 * length for length in dashes[1]]


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]
