"""Ways to raise or lower the diversity on purpose, to experiment with: nothing else in the package needs them."""

from divebatch.research.langevin_noise import LangevinNoise
from divebatch.research.quantized_gradients import QuantizedGradients
from divebatch.research.stratified_batches import StratifiedBatches

__all__ = ["LangevinNoise", "QuantizedGradients", "StratifiedBatches"]
