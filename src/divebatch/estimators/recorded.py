"""Backward passes that are only written down, for a CUDA graph."""

import torch
from torch import Tensor


def is_recorded(tensor: Tensor) -> bool:
    """Whether the pass under way is only written down: its replays are those that count, and no hook sees them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
