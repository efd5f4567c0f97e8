"""Per-sample gradient norms and gradient diversity, usable on their own. A new layer family is one file here."""

from divebatch.norms import (  # noqa: F401  each registers its rules
    attention,
    conv,
    embedding,
    linear,
    normalization,
    recurrent,
)
from divebatch.norms.diversity import DiversityMeter, gradient_diversity
from divebatch.norms.meter import NormMeter
from divebatch.norms.registry import rule_for
from divebatch.norms.shared_parameters import shared_by_samples

__all__ = ["DiversityMeter", "NormMeter", "gradient_diversity", "rule_for", "shared_by_samples"]
