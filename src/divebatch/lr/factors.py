"""What the learning rate is multiplied by at each batch size, by the name of the coupling."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch.optim import Optimizer

from divebatch.checks import require_coupling_power
from divebatch.errors import ArgumentError
from divebatch.measurement import gain

CouplingName = Literal["none", "linear", "sqrt", "adam", "adascale", "adascale-sqrt", "1/(1+B/b)"]
Coupling = CouplingName | float
"""A name, or a number p for the p-th power of the batch size."""

COUPLINGS: dict[str, Callable[[float, float | None], float]] = {
    "none": lambda ratio, noise: 1.0,
    "linear": lambda ratio, noise: ratio,
    "sqrt": lambda ratio, noise: math.sqrt(ratio),
    "adam": lambda ratio, noise: math.sqrt(ratio),
    "adascale": gain,
    "adascale-sqrt": lambda ratio, noise: math.sqrt(gain(ratio, noise)),
    "1/(1+B/b)": lambda ratio, noise: 1.0 if noise is None else 1 / (1 + noise / ratio),
}
"""f(batch_size / base, noise): `linear` keeps lr / batch_size (SGD, Goyal 2017), `sqrt` suits Adam-like rules.

`adam` moves betas, eps and weight decay too (`ADAM_RULES`). `adascale` follows what was measured, `adascale-sqrt` is
the same for Adam-like rules. `1/(1+B/b)` is SGD's best rate at the batch size b where the noise scale is B (McCandlish
et al. 2018), relative to the best rate without noise.
"""
BY_GAIN = frozenset({"adascale", "adascale-sqrt"})
"""Those that say what a step is worth: see `GainSum`."""
BY_NOISE = BY_GAIN | {"1/(1+B/b)"}
"""Those that must know the noise scale."""
BY_SIZE = ("linear", "sqrt", "adam")
"""Those that follow the batch size by a power of it, as every number does."""
_ADAM_LIKE = tuple(
    kind
    for name in (
        *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam"),
        *("RMSprop", "Adagrad", "Adadelta", "Adafactor", "Muon"),
    )
    if (kind := getattr(torch.optim, name, None)) is not None  # older versions of torch lack the last two
)


def require_known(coupling: Coupling) -> None:
    """Raise for what is no coupling."""
    if not isinstance(coupling, str):
        require_coupling_power("lr_coupling", coupling)
    elif coupling not in COUPLINGS:
        raise ArgumentError(
            f"unknown lr_coupling {coupling!r}; known: {', '.join(COUPLINGS)}, or a power of the batch size such as 0.6"
        )


def factor_of(coupling: Coupling, ratio: float, noise: float | None = None) -> float:
    """Return what the rate is multiplied by.

    Args:
        coupling: A name of `COUPLINGS`, or a power.
        ratio: The batch size over the base batch size.
        noise: The noise scale over the base batch size, where it is known.
    """
    return COUPLINGS[coupling](ratio, noise) if isinstance(coupling, str) else float(ratio**coupling)


def coupling_for(optimizer: Optimizer, *, one_of: int = 1) -> Literal["linear", "sqrt"]:
    """Return "linear" for SGD and "sqrt" for Adam-like optimizers, whose step does not grow with the gradient.

    `one_of` is the number of optimizers that train together.
    """
    # By type and not by name: a user's subclass of Adam is Adam-like too.
    if isinstance(optimizer, _ADAM_LIKE):
        return "sqrt"
    if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD):
        return "linear"
    one = "Auto(..., lr_coupling='sqrt')"
    several = "Controller(..., lr_coupling=[...]) with a name for each optimizer: 'sqrt'"
    raise ArgumentError(
        f"{type(optimizer).__name__} is no optimizer of torch.optim for which it is known how the learning rate must "
        f"follow the batch size: pass {one if one_of == 1 else several} if it is Adam-like, 'linear' if it is like SGD"
    )
