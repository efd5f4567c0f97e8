"""Hugging Face Transformers: a Trainer whose gradient accumulation follows a policy, and a callback that only measures.

The Trainer fixes its loader and its schedule before the first step, so neither may move. What moves is
`gradient_accumulation_steps`: a backward pass always takes `per_device_train_batch_size` samples.
"""

from divebatch.integrations.transformers import conv1d as _conv1d  # noqa: F401 - its norm rule
from divebatch.integrations.transformers.checkpoints import STATE_FILE
from divebatch.integrations.transformers.framework import REQUIREMENT
from divebatch.integrations.transformers.noise_scale import NoiseScaleCallback
from divebatch.integrations.transformers.trainer import BatchSizeTrainer

__all__ = ["REQUIREMENT", "STATE_FILE", "BatchSizeTrainer", "NoiseScaleCallback"]
