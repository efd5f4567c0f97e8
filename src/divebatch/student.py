"""Student's t distribution, for any positive degrees of freedom."""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy

MOST_DEGREES = 1e6
"""From here on t is taken for normal."""
NODES, WEIGHTS = numpy.polynomial.legendre.leggauss(64)


@lru_cache(maxsize=128)  # intervals of one size ask for the same one again and again
def t_quantile(probability: float, degrees: float) -> float:
    """Return the value below which t stays with `probability` (from 0.5 to 1, exclusive); infinite below 1 degree.

    >>> round(t_quantile(0.975, 4), 4), round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 1e6), 3)
    (2.7764, 12.706, 1.96)
    """
    if degrees < 1:
        return math.inf
    degrees = min(degrees, MOST_DEGREES)
    value = NormalDist().inv_cdf(probability)
    # Newton's method: above 0 the distribution is concave, and t lies above the normal, so it only rises to the root.
    while True:
        below, density = _distribution(value, degrees)
        step = (probability - below) / density
        value += step
        if step <= 1e-12 * value:
            return value


def _distribution(value: float, degrees: float) -> tuple[float, float]:
    """Return P(t <= value), value >= 0, and the density. That of a in t = sqrt(n) tan(a) is c cos(a)^(n - 1)."""
    end = math.atan(value / math.sqrt(degrees))
    # Nodes that gather logarithmically towards pi/2, where the density of few degrees has a root.
    log_rest, parts = math.log1p(-2 * end / math.pi), (NODES + 1) / 2
    a, slope = -math.pi / 2 * numpy.expm1(parts * log_rest), -math.pi / 2 * log_rest * numpy.exp(parts * log_rest)
    x = degrees / 2
    if degrees < 100:
        log_ratio = math.lgamma(x + 0.5) - math.lgamma(x)
    else:  # the difference of two large numbers has few digits: Stirling's series
        log_ratio = math.log(x) / 2 - 1 / (8 * x) + 1 / (192 * x**3) - 1 / (640 * x**5)
    c = math.exp(log_ratio) / math.sqrt(math.pi)
    integral = float(WEIGHTS / 2 @ (slope * numpy.cos(a) ** (degrees - 1)))
    return 0.5 + c * integral, c * math.cos(end) ** (degrees + 1) / math.sqrt(degrees)
