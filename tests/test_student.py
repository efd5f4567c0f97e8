import math

import numpy as np
import pytest

from divebatch.measurement import _distribution, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 29: 2.0452, 30: 2.0423}
"""Two-sided 95 % points as printed in tables of Student's t."""


@pytest.mark.parametrize(("degrees", "value"), TABLE.items())
def test_quantiles_are_those_of_printed_tables(degrees, value):
    assert t_quantile(0.975, degrees) == pytest.approx(value, abs=5e-5)


EXACT = {
    1: 12.706204736174694,
    2: 4.302652729749462,
    5.5: 2.501858617589239,
    99: 1.9842169515864174,
    100: 1.9839715185235518,
    1000: 1.9623390808264083,
    1e5: 1.9599877075346095,
}
"""The same by `scipy.stats.t.ppf`."""


@pytest.mark.parametrize(("degrees", "value"), EXACT.items())
def test_quantiles_have_ten_digits(degrees, value):
    assert t_quantile(0.975, degrees) == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("degrees", [1, 1.5, 2, 5, 7.3, 31])
def test_the_distribution_is_the_integral_of_its_density(degrees):
    """The slow twin: the density summed over fine steps."""
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    for value in (0.0, 0.3, 1.0, 2.5, 6.0):
        x = np.linspace(0.0, value, 20_001)
        density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        integral = float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        below, slope = _distribution(value, degrees)
        assert below == pytest.approx(0.5 + integral, abs=1e-7)
        assert slope == pytest.approx(density[-1])
        assert value == 0 or t_quantile(below, degrees) == pytest.approx(value)


@pytest.mark.parametrize("degrees", [1e6, 1e12, 1e31, math.inf])
def test_with_many_degrees_of_freedom_it_is_normal(degrees):
    assert t_quantile(0.975, degrees) == pytest.approx(1.959964, abs=1e-5)


def test_below_one_degree_of_freedom_nothing_is_known():
    assert t_quantile(0.975, 0.5) == math.inf
