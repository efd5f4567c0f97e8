"""How figures look: one colour and one dash pattern a method, the same everywhere."""

from dataclasses import dataclass
from typing import Any, Literal

from divebatch.report.summary import MethodSummary
from divebatch.report.table import batch_size_range

SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "divebatch",
}
"""Over matplotlib's defaults. Text in SVG stays text; ids follow from the content, so equal figures are equal bytes."""


@dataclass(frozen=True, slots=True)
class Look:
    """Name, colour and dashes of a method's line. Dashes as matplotlib takes them: (offset, lengths in points)."""

    label: str
    color: str
    dashes: tuple[float, tuple[float, ...]] | Literal["solid"]


# Colours differ in lightness as well as hue, so they hold under the common colour-vision deficiencies and in grey.
LOOKS = {
    "sgd-small": Look("SGD", "#0072B2", (0, (5.0, 1.6))),
    "sgd-large": Look("SGD", "#882255", (0, (5.0, 1.6, 1.2, 1.6))),
    "adabatch": Look("AdaBatch", "#009E73", (0, (2.4, 1.2))),
    "divebatch": Look("DiveBatch", "#D55E00", "solid"),
    "oracle": Look("Oracle", "#222222", (0, (7.0, 2.0))),
}
EXACT = Look("exact diversity on DiveBatch's path", LOOKS["divebatch"].color, (0, (1.0, 1.3)))


def legend_label(summary: MethodSummary) -> str:
    """The method's name with its first batch size and, where it differs, the mean of the final ones."""
    name = LOOKS[summary.method].label
    return f"{name} ({batch_size_range(summary.first_batch_size, summary.final_batch_size, ' - ')})"
