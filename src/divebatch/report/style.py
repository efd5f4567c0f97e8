"""How figures look: one colour and one dash pattern a method, the same everywhere."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
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


Dashes = tuple[float, tuple[float, ...]] | Literal["solid"]
"""As matplotlib takes them: (offset, lengths in points)."""
DASHED: Dashes = (0, (3.0, 1.5))
DOTTED: Dashes = (0, (1.0, 1.3))


@dataclass(frozen=True, slots=True)
class Look:
    """Name, colour and dashes of a method's line."""

    label: str
    color: str
    """On white."""
    dashes: Dashes

    @property
    def dark_color(self) -> str:
        """The same on a dark page, where black and deep colours would be lost."""
        return ON_DARK.get(self.color, self.color)


ON_DARK = {
    "#0072B2": "#4DA8E0",
    "#882255": "#D96BA0",
    "#009E73": "#2CC79A",
    "#D55E00": "#FF8A3D",
    "#222222": "#EDEDED",
    "#CC79A7": "#E3A5C7",
    "#7F5F2A": "#C8A25C",
}
# Colours differ in lightness as well as hue, so they hold under the common colour-vision deficiencies and in grey.
LOOKS = {
    "sgd-small": Look("SGD", "#0072B2", (0, (5.0, 1.6))),
    "sgd-large": Look("SGD", "#882255", (0, (5.0, 1.6, 1.2, 1.6))),
    "adabatch": Look("AdaBatch", "#009E73", (0, (2.4, 1.2))),
    "divebatch": Look("DiveBatch", "#D55E00", "solid"),
    "oracle": Look("Oracle", "#222222", (0, (7.0, 2.0))),
}
REAL_LOOKS = {
    "sgd-small": Look("SGD", LOOKS["sgd-small"].color, "solid"),
    "sgd-large": Look("SGD", LOOKS["sgd-large"].color, "solid"),
    "sgd-large-rescaled": Look("SGD, lr rescaled", LOOKS["sgd-large"].color, DASHED),
    "sgd-large-warmup": Look("SGD, warm-up", "#CC79A7", "solid"),
    "sgd-tuned": Look("SGD, tuned", "#222222", "solid"),
    "adabatch": Look("AdaBatch", LOOKS["adabatch"].color, "solid"),
    "adabatch-rescaled": Look("AdaBatch, lr rescaled", LOOKS["adabatch"].color, DASHED),
    "divebatch": Look("DiveBatch", LOOKS["divebatch"].color, "solid"),
    "divebatch-rescaled": Look("DiveBatch, lr rescaled", LOOKS["divebatch"].color, DASHED),
    "divebatch-every-epoch": Look("DiveBatch, every epoch", "#E69F00", "solid"),
}
"""With ten methods in one figure, dashes mean one thing only: the learning rate follows the batch size."""
SPARE_LOOKS: list[tuple[str, Dashes]] = [
    ("#56B4E9", "solid"),
    ("#999999", "solid"),
    ("#7F5F2A", "solid"),
    ("#56B4E9", DOTTED),
    ("#999999", DOTTED),
    ("#7F5F2A", DOTTED),
]
"""For methods of a user's own, in turn."""
SHADOW_LOOKS: list[tuple[str, Dashes]] = [
    (color, dashes)
    for dashes in (DASHED, DOTTED)
    for color in ("#0072B2", "#D55E00", "#009E73", "#882255", "#E69F00", "#56B4E9", "#CC79A7", "#7F5F2A", "#999999")
]
"""For policies that only watch, in turn."""
EXACT = Look("exact diversity on DiveBatch's path", LOOKS["divebatch"].color, DOTTED)


def real_looks(methods: Iterable[str]) -> dict[str, Look]:
    """One for each method: ours where we know it, else its name in a spare look."""
    spare = cycle(SPARE_LOOKS)
    return {method: REAL_LOOKS.get(method) or Look(method, *next(spare)) for method in methods}


def looks_for(methods: Iterable[str], *, real_data: bool) -> dict[str, Look]:
    """The looks of the experiment's own figures."""
    known = {} if real_data else {method: LOOKS[method] for method in methods if method in LOOKS}
    return real_looks(methods) | known


def legend_label(summary: MethodSummary, look: Look) -> str:
    """The method's name with its first batch size and, where it differs, the mean of the final ones."""
    return f"{look.label} ({batch_size_range(summary.first_batch_size, summary.final_batch_size, ' - ')})"
