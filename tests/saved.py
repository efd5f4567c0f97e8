"""What a checkpoint's file brings back."""

import io
from typing import Any

import torch


def through_a_file(value: Any) -> Any:
    """`value` as it is read back, without running any code in the file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
