"""Ways to raise or lower the diversity on purpose, for experiments; the library does not depend on them."""

from divebatch.research.langevin import LangevinNoise
from divebatch.research.quantized import QuantizedGradients
from divebatch.research.stratified import StratifiedBatches

__all__ = ["LangevinNoise", "QuantizedGradients", "StratifiedBatches"]
