"""Per-sample gradient norms and gradient diversity, for separate use. A new layer family is one file in `rules`."""

from divebatch.norms.meter import DiversityMeter, NormMeter, gradient_diversity
from divebatch.norms.registry import rule_for
from divebatch.norms.rules import (  # noqa: F401  each registers its rules
    attention,
    conv,
    embedding,
    linear,
    normalization,
    recurrent,
)
from divebatch.norms.rules.shared import shared_by_samples

__all__ = ["DiversityMeter", "NormMeter", "gradient_diversity", "rule_for", "shared_by_samples"]
