"""A probe as one picture: how far each branch falls behind, and which batch sizes policies ask for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from divebatch.lab.probe.policy_sizes import Asked
from divebatch.lab.probe.verdict import Probe
from divebatch.report.drawing import Drawing, add_heading, finish, require_matplotlib, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOR, LIMIT = "#0072B2", "#D55E00"
ESTIMATES = ("#0072B2", "#009E73", "#222222", "#882255", "#E69F00", "#56B4E9", "#CC79A7")
"""Colours of the estimates, in the order in which they were asked."""
MOST_BEHIND = 100.0
"""Percent at which the axis ends: a branch that diverged must not flatten the others."""
FARTHEST = 50
"""How many times the largest branch the axis of sizes goes to: an estimate of anything up to 10^9 must not either."""


def draw_probe(name: str, heading: str, probe: Probe, asked: Sequence[Asked], *, word: str = "loss") -> Drawing:
    """Left the branches, right the noise scales and policies. `word` is what was compared."""
    require_matplotlib()
    with settings():
        from matplotlib.figure import Figure

        rows = _rows([each for each in asked if not each.problem])
        figure = Figure(figsize=(10.4, max(3.8, 1.8 + 0.28 * len(rows))), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_gaps(left, probe, word)
        _draw_asked(right, probe, rows)
        add_heading(figure, heading)
        caption = (
            f"Left: {word} at the end of the window, relative to the present batch size on the same data; bars are "
            "95 % intervals over repeats. Right: noise scales with their 95 % intervals, and the batch sizes that "
            "policies ask for on them (an arrow: beyond the edge); the line is the critical batch, in the band where "
            "it may lie.",
        )
        return finish(name, heading, figure, caption)


def _draw_gaps(axes: "Axes", probe: Probe, word: str) -> None:
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
    axes.set_title(f"{word.capitalize()} above the present batch size's (%)", loc="left")


def _clip(percent: float) -> float:
    return min(max(percent, -MOST_BEHIND), MOST_BEHIND)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A size on the estimate with this name and colour, with the ends of its interval where it has one."""

    estimate: str
    color: str
    size: float
    ends: tuple[float, float] | None = None


def _draw_asked(axes: "Axes", probe: Probe, rows: Mapping[str, Sequence[_Mark]]) -> None:
    from matplotlib.ticker import FuncFormatter

    critical, sizes = probe.critical, [mark.size for marks in rows.values() for mark in marks]
    largest = probe.gaps[-1].batch_size
    most, least = max(largest, min(max(sizes, default=0), FARTHEST * largest)), min([*sizes, probe.batch_size])
    axes.axvspan(critical.low, critical.high or 2 * most, color=LIMIT, alpha=0.15, linewidth=0)
    axes.axvline(critical.size, color=LIMIT, linewidth=1.2)
    axes.axvline(probe.batch_size, color="#999999", linewidth=1.2, linestyle=(0, (3, 2)))
    for place, marks in enumerate(rows.values()):
        for mark, height in zip(marks, _heights(place, len(marks)), strict=True):
            if mark.ends is not None:
                axes.plot(mark.ends, [height, height], color=mark.color, linewidth=1.2)
            look = "o" if mark.size <= most else ">"
            axes.plot([min(mark.size, most)], [height], color=mark.color, marker=look, linestyle="none")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xscale("log", base=10)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.set_xlim(least / 2, 2 * most)
    axes.set(xlabel="Batch size (samples); dashed: the present one")
    axes.set_title("Critical batch and what is asked for", loc="left")
    _add_legend(axes, {mark.estimate: mark.color for marks in rows.values() for mark in marks})


def _heights(place: int, count: int) -> list[float]:
    """Of the marks in a row, a little apart: equal sizes would hide each other."""
    step = min(0.14, 0.6 / count)
    return [place + step * (number - (count - 1) / 2) for number in range(count)]


def _add_legend(axes: "Axes", colors: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=color, marker="o", linestyle="none", label=name) for name, color in colors.items()]
    if marks:
        axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="measured by", fontsize=9)


def _rows(asked: Sequence[Asked]) -> dict[str, list[_Mark]]:
    """What each row shows, by its label: first a row for each noise scale, then one for each policy."""
    colors = dict(zip((str(each.question) for each in asked), cycle(ESTIMATES), strict=False))
    rows: dict[str, list[_Mark]] = {}
    for each in asked:
        name = str(each.question)
        if each.noise_scale is not None and each.question.is_noise_scale:
            mark = _Mark(name, colors[name], max(1.0, each.noise_scale), _ends(each, each.noise_scale))
            rows.setdefault(f"noise scale, {each.question.norm}", []).append(mark)
    for each in asked:
        for policy, size in each.sizes.items():
            rows.setdefault(policy, []).append(_Mark(str(each.question), colors[str(each.question)], float(size)))
    return rows


def _ends(each: Asked, noise_scale: float) -> tuple[float, float]:
    """Of its interval; one that has no end goes over the edge of the picture."""
    high = each.high if each.high is not None and math.isfinite(each.high) else 1000 * noise_scale
    return max(1.0, each.low or 1.0), high
