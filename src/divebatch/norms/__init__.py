"""Per-sample gradient norms and gradient diversity, usable on their own. A new layer family is one file here."""

from divebatch.norms import conv, embedding, linear, normalization  # noqa: F401  each registers its rules
from divebatch.norms.diversity import DiversityMeter, gradient_diversity
from divebatch.norms.meter import NormMeter
from divebatch.norms.registry import rule_for

__all__ = ["DiversityMeter", "NormMeter", "gradient_diversity", "rule_for"]
