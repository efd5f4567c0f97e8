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
from divebatch.norms.forms import chunk_size
from divebatch.norms.registry import Entry


class _Bare(nn.Module):
    """A layer without its hooks, since hooks may have changed the output and `dy` belongs to the original."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def by_vmap(layer: nn.Module, inputs: dict[str, Any], dy: Tensor) -> Mapping[str, Tensor]:
    """Run the layer again on each sample and differentiate; the layer must not mix samples or be random.

    Arguments with as many rows as samples have one row per sample; samples share all others.
    """
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    dims = tree_map(lambda x: 0 if isinstance(x, Tensor) and x.ndim and len(x) == len(dy) else None, inputs)
    bare, signature = _Bare(layer), inspect.signature(layer.forward)

    def loss(trained: dict[str, Tensor], sample: dict[str, Any], sample_dy: Tensor) -> Tensor:
        arguments = tree_map(lambda value, dim: value if dim is None else value[None], sample, dims)
        call = inspect.BoundArguments(signature, arguments)
        output = functional_call(bare, {f"layer.{name}": p for name, p in trained.items()}, call.args, call.kwargs)
        if not isinstance(output, Tensor):
            raise CoverageError("it has several outputs, which fallback='vmap' cannot measure")
        return (output * sample_dy[None]).sum()

    chunk = chunk_size(dy, 2 * sum(p.numel() for p in parameters.values()))
    per_sample: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, dims, 0), chunk_size=chunk)
    try:
        with torch.enable_grad():
            return {name: gradient.detach() for name, gradient in per_sample(parameters, inputs, dy).items()}
    except CoverageError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise CoverageError(
            f"fallback='vmap' cannot run it sample by sample: {error}",
            f"give the layer its batch dimension first, {len(dy)} rows of one sample each in every argument that "
            f"differs between samples, and another number of rows in those that samples share",
        ) from error


NOT_BY_SAMPLES = (
    nn.MultiheadAttention,
    NonDynamicallyQuantizableLinear,
    nn.RNNBase,
    nn.ParameterList,
    nn.ParameterDict,
    ParametrizationList,
)
"""Layers that vmap cannot run for single samples: fused kernels, or parameters that no own forward uses."""

FALLBACKS: dict[str, Entry] = {"vmap": Entry(by_vmap, None, all_inputs=True, never_for=NOT_BY_SAMPLES)}
"""Rules for layers without their own rule, by name. They cover all parameters."""
