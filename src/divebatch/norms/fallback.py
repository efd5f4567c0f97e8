"""Per-sample gradients of any layer through torch.func: general, slower, and only on request."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from divebatch.norms.forms import chunk_size
from divebatch.norms.registry import Entry


def by_vmap(layer: nn.Module, inputs: dict[str, Any], dy: Tensor) -> Mapping[str, Tensor]:
    """Run the layer again on each sample alone and differentiate; it must not mix samples nor be random."""
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    mapped = {name: _has_samples(value, len(dy)) for name, value in inputs.items()}

    def loss(trained: dict[str, Tensor], sample: dict[str, Any], sample_dy: Tensor) -> Tensor:
        arguments = {name: value[None] if mapped[name] else value for name, value in sample.items()}
        output: Tensor = functional_call(layer, trained, (), arguments)
        return (output * sample_dy[None]).sum()

    dims = {name: 0 if is_mapped else None for name, is_mapped in mapped.items()}
    chunk = chunk_size(dy, 2 * sum(p.numel() for p in parameters.values()))
    per_sample: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, dims, 0), chunk_size=chunk)
    with torch.enable_grad():
        return {name: gradient.detach() for name, gradient in per_sample(parameters, inputs, dy).items()}


def _has_samples(value: Any, num_samples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_samples


NOT_BY_SAMPLES = (nn.MultiheadAttention, NonDynamicallyQuantizableLinear, nn.RNNBase)
"""Layers vmap cannot run sample by sample: fused kernels, or parameters that no forward of their own uses."""

FALLBACKS: dict[str, Entry] = {"vmap": Entry(by_vmap, None, all_inputs=True, never_for=NOT_BY_SAMPLES)}
"""What may stand in for a layer without a rule; `None` as parameters: it states all of them."""
