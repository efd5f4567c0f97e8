"""Student's t distribution, for any positive degrees of freedom."""

import math
from functools import lru_cache

MOST_DEGREES = 1e6
"""From here on t is taken for normal."""
_TINY = 1e-300
"""Stands in for a zero denominator of the continued fraction."""


@lru_cache(maxsize=128)  # intervals of one size ask for the same one again and again
def t_quantile(probability: float, degrees: float) -> float:
    """The value below which t stays with `probability` (from 0.5 to 1, exclusive); infinite below 1 degree of freedom.

    >>> round(t_quantile(0.975, 4), 4), round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 1e6), 3)
    (2.7764, 12.706, 1.96)
    """
    if degrees < 1:
        return math.inf
    # Beyond, the two are equal to six digits, and the gamma function's own digits run out.
    degrees = min(degrees, MOST_DEGREES)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    # 60 halvings are past the precision of a double.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high


def t_cdf(value: float, degrees: float) -> float:
    """P(t <= value) for value >= 0: 1 - I_x(degrees / 2, 1/2) / 2 with x = degrees / (degrees + value^2)."""
    return 1 - _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + value**2)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized I_x(a, b), from the side on which its continued fraction converges fast."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    if x == 0:
        return 0.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    """DLMF 8.17.22, evaluated from the front (Lentz): terms are multiplied in until one changes nothing."""
    above, below = 1.0, 1 / _or_tiny(1 - (a + b) * x / (a + 1))
    fraction = below
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            below = 1 / _or_tiny(1 + term * below)
            above = _or_tiny(1 + term / above)
            fraction *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return fraction


def _or_tiny(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
