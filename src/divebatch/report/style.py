"""How lines look: one colour and one dash pattern a method, the same in every figure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

Dashes = tuple[float, tuple[float, ...]] | Literal["solid"]
"""As matplotlib takes them: (offset, lengths in points)."""
DASHED: Dashes = (0, (3.0, 1.5))
DOTTED: Dashes = (0, (1.0, 1.3))
PATTERNS: tuple[Dashes, ...] = ("solid", DASHED, DOTTED, (0, (5.0, 1.6, 1.2, 1.6)))
# Colours differ in lightness as well as hue, so they hold under the common colour-vision deficiencies and in grey.
ON_DARK = {
    "#0072B2": "#4DA8E0",
    "#882255": "#D96BA0",
    "#009E73": "#2CC79A",
    "#D55E00": "#FF8A3D",
    "#222222": "#EDEDED",
    "#E69F00": "#E69F00",
    "#56B4E9": "#56B4E9",
    "#CC79A7": "#E3A5C7",
    "#7F5F2A": "#C8A25C",
    "#999999": "#999999",
}
"""Every colour, in the order in which methods get them, and the same on a dark page, where deep ones would be lost."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and dashes of a line."""

    color: str
    """On white."""
    dashes: Dashes

    @property
    def dark_color(self) -> str:
        """The same on a dark page."""
        return ON_DARK[self.color]


def looks_for(methods: Iterable[str]) -> dict[str, Look]:
    """A look for each method, by its place; a name that continues another's gets that one's colour in other dashes.

    >>> looks = looks_for(["sgd", "adabatch", "adabatch-rescaled"])
    >>> looks["adabatch"].color == looks["adabatch-rescaled"].color != looks["sgd"].color
    True
    """
    looks: dict[str, Look] = {}
    free = [Look(color, dashes) for dashes, color in product(PATTERNS, ON_DARK)]
    for number, method in enumerate(methods):
        bases = [looks[name].color for name in looks if method.startswith(f"{name}-")]
        related = [look for look in free if look.color in bases[-1:]]
        fresh = [look for look in free if look.color not in {used.color for used in looks.values()}]
        look = next(iter(related or fresh or free), Look(list(ON_DARK)[number % len(ON_DARK)], "solid"))
        looks[method] = look
        free = [other for other in free if other != look]
    return looks


def other_looks(taken: str) -> list[Look]:
    """Looks for lines beside a solid one of the colour `taken`, in turn."""
    return [Look(color, dashes) for dashes in (DASHED, DOTTED) for color in ON_DARK if color != taken]
