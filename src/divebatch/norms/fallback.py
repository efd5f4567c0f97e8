"""Per-sample gradients of any layer through torch.func: general, slower, and only on request."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map

from divebatch.errors import CoverageError
from divebatch.norms.registry import Entry
from divebatch.norms.sample_gradients import chunk_size


def by_vmap(layer: nn.Module, inputs: dict[str, Any], dy: Tensor) -> Mapping[str, Tensor]:
    """Run the layer again on each sample alone and differentiate; it must not mix samples nor be random."""
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    bare = _Bare(layer)
    dims = tree_map(lambda value: 0 if _has_samples(value, len(dy)) else None, inputs)
    signature = inspect.signature(layer.forward)

    def loss(trained: dict[str, Tensor], sample: dict[str, Any], sample_dy: Tensor) -> Tensor:
        arguments = tree_map(lambda value, dim: value if dim is None else value[None], sample, dims)
        call = inspect.BoundArguments(signature, arguments)
        output = functional_call(bare, {f"layer.{name}": p for name, p in trained.items()}, call.args, call.kwargs)
        if not isinstance(output, Tensor):
            raise CoverageError(f"{type(layer).__name__} has several outputs, which fallback='vmap' cannot measure")
        return (output * sample_dy[None]).sum()

    chunk = chunk_size(dy, 2 * sum(p.numel() for p in parameters.values()))
    per_sample: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, dims, 0), chunk_size=chunk)
    with torch.enable_grad():
        return {name: gradient.detach() for name, gradient in per_sample(parameters, inputs, dy).items()}


class _Bare(nn.Module):
    """A layer without its hooks, which saw or changed the output that `dy` does not belong to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def _has_samples(value: Any, num_samples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_samples


NOT_BY_SAMPLES = (
    nn.MultiheadAttention,
    NonDynamicallyQuantizableLinear,
    nn.RNNBase,
    nn.ParameterList,
    nn.ParameterDict,
    ParametrizationList,
)
"""Layers vmap cannot run sample by sample: fused kernels, or parameters that no forward of their own uses."""

FALLBACKS: dict[str, Entry] = {"vmap": Entry(by_vmap, None, all_inputs=True, never_for=NOT_BY_SAMPLES)}
"""What may measure a layer without a rule, by name. Its parameters are None: it states all of them."""
