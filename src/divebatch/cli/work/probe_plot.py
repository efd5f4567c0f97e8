"""A probe as one picture: how far each branch falls behind, and which batch sizes policies ask for."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divebatch.estimators import ESTIMATORS
from divebatch.lab.probe.policy_sizes import Asked
from divebatch.lab.probe.verdict import Probe
from divebatch.report.drawing import Drawing, add_heading, finish, require_matplotlib, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOR, LIMIT, ASKED = "#0072B2", "#D55E00", "#222222"
MOST_BEHIND = 100.0
"""Percent at which the axis ends: a branch that diverged must not flatten the others."""


def draw_probe(name: str, heading: str, probe: Probe, asked: Sequence[Asked]) -> Drawing:
    """Left the branches, right the policies, over the same batch sizes."""
    require_matplotlib()
    with settings():
        from matplotlib.figure import Figure

        rows = list(_rows(asked))
        figure = Figure(figsize=(9.6, max(3.6, 1.6 + 0.28 * len(rows))), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_gaps(left, probe)
        _draw_asked(right, probe, rows)
        add_heading(figure, heading)
        caption = (
            "Left: loss at the end of the window, relative to the present batch size on the same data; bars are 95 % "
            "intervals over repeats. Right: batch sizes that policies ask for; the band is the critical batch.",
        )
        return finish(name, heading, figure, caption)


def _draw_gaps(axes: "Axes", probe: Probe) -> None:
    from matplotlib.ticker import NullLocator

    gaps = probe.gaps
    middle = [_clip(100 * gap.mean) for gap in gaps]
    below = [max(0.0, value - _clip(100 * gap.low)) for value, gap in zip(middle, gaps, strict=True)]
    above = [max(0.0, _clip(100 * gap.high) - value) for value, gap in zip(middle, gaps, strict=True)]
    sizes = [gap.batch_size for gap in gaps]
    axes.errorbar(sizes, middle, yerr=[below, above], color=COLOR, marker="o", capsize=3)
    axes.axhline(100 * probe.tolerance, color=LIMIT, linewidth=1.2)
    note = f"tolerance {100 * probe.tolerance:g} %"
    axes.annotate(
        note,
        (0.02, 100 * probe.tolerance),
        xycoords=("axes fraction", "data"),
        color=LIMIT,
        fontsize=9,
        xytext=(0, 4),
        textcoords="offset points",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Batch size (samples)")
    axes.set_title("Loss above the present batch size's (%)", loc="left")


def _clip(percent: float) -> float:
    return min(max(percent, -MOST_BEHIND), MOST_BEHIND)


def _draw_asked(axes: "Axes", probe: Probe, rows: list[tuple[str, float, tuple[float, float] | None]]) -> None:
    from matplotlib.ticker import FuncFormatter

    critical = probe.critical
    most = max([size for _, size, _ in rows] + [probe.gaps[-1].batch_size])
    axes.axvspan(critical.low, critical.high or 2 * most, color=LIMIT, alpha=0.15, linewidth=0)
    axes.axvline(critical.size, color=LIMIT, linewidth=1.2)
    axes.axvline(probe.batch_size, color="#999999", linewidth=1.2, linestyle=(0, (3, 2)))
    for place, (_, size, ends) in enumerate(rows):
        if ends is not None:
            axes.plot(ends, [place, place], color=ASKED, linewidth=1.2)
        axes.plot([size], [place], color=ASKED, marker="o")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xscale("log", base=10)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.set_xlim(right=2 * most)
    axes.set(xlabel="Batch size (samples); dashed: the present one")
    axes.set_title("Critical batch and what is asked for", loc="left")


def _rows(asked: Sequence[Asked]) -> list[tuple[str, float, tuple[float, float] | None]]:
    """(label, size, interval): the noise scale first, then the policies of each estimator."""
    rows: list[tuple[str, float, tuple[float, float] | None]] = []
    for each in asked:
        if each.noise_scale is not None and ESTIMATORS[each.estimator].at_fixed_weights:
            low, high = each.low or 1.0, each.high
            ends = (max(1.0, low), high if high is not None and math.isfinite(high) else 10 * each.noise_scale)
            rows.append((f"noise scale ({each.estimator})", max(1.0, each.noise_scale), ends))
        rows += [(f"{policy} ({each.estimator})", float(size), None) for policy, size in each.sizes.items()]
    return rows
