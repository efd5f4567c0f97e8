"""Per-sample gradients of any layer through torch.func: general, slower, and only on request."""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from divebatch.errors import CoverageError
from divebatch.norms.forms import chunk_size
from divebatch.norms.registry import Entry

MOST_DOUBTFUL = 4
"""Arguments with as many rows as there are samples, beside the first, whose meaning is tried out."""

# A cache for the process: which arguments hold samples is found out once for each layer and number of samples.
_found: "weakref.WeakKeyDictionary[nn.Module, dict[int, Any]]" = weakref.WeakKeyDictionary()


def by_vmap(layer: nn.Module, inputs: dict[str, Any], dy: Tensor) -> Mapping[str, Tensor]:
    """Run the layer again on each sample alone and differentiate; it must not mix samples nor be random."""
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    run = _Run(layer)

    def loss(trained: dict[str, Tensor], sample: dict[str, Any], sample_dy: Tensor) -> Tensor:
        return (run.on_sample(trained, sample, dims) * sample_dy[None]).sum()

    try:
        dims = _sample_dims(run, inputs, len(dy))
        chunk = chunk_size(dy, 2 * sum(p.numel() for p in parameters.values()))
        per_sample: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, dims, 0), chunk_size=chunk)
        with torch.enable_grad():
            return {name: gradient.detach() for name, gradient in per_sample(parameters, inputs, dy).items()}
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, CoverageError):
            raise
        raise CoverageError(f"fallback='vmap' cannot run it sample by sample: {error}") from error


class _Run:
    """A layer without its hooks, which saw or changed the output that `dy` does not belong to."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self._bare, self._signature = layer, _Bare(layer), inspect.signature(layer.forward)

    def on_all(self, arguments: dict[str, Any], parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The output for arguments as the layer has them."""
        call = inspect.BoundArguments(self._signature, arguments)
        given = {f"layer.{name}": p for name, p in (parameters or {}).items()}
        output = functional_call(self._bare, given, call.args, call.kwargs)
        if not isinstance(output, Tensor):
            raise CoverageError("it has several outputs, which fallback='vmap' cannot measure")
        return output

    def on_sample(self, parameters: Mapping[str, Tensor], sample: dict[str, Any], dims: Any) -> Tensor:
        """The output for one sample, with a batch dimension of 1."""
        arguments = tree_map(lambda value, dim: value if dim is None else value[None], sample, dims)
        return self.on_all(arguments, parameters)


class _Bare(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def _sample_dims(run: _Run, inputs: dict[str, Any], num_samples: int) -> Any:
    """For each argument 0 if it has a row for each sample, None if all samples share it."""
    known = _found.setdefault(run.layer, {})
    likely = tree_map(lambda value: 0 if _has_samples(value, num_samples) else None, inputs)
    doubtful = sum(dim == 0 for dim in tree_leaves(likely, is_leaf=lambda dim: dim is None)) - 1
    if not 1 <= doubtful <= MOST_DOUBTFUL:
        return likely
    if num_samples not in known:
        # A mask for T positions has as many rows as a batch of T samples: only trying tells them apart.
        found = (dims for dims in _choices(likely) if _gives_same(run, inputs, dims))
        known[num_samples] = next(found, None)
    if known[num_samples] is None:
        raise CoverageError(
            "run sample by sample it gives another output than on the whole batch: it mixes samples, is random, or has "
            "arguments of which fallback='vmap' cannot tell whether they hold one row a sample"
        )
    return known[num_samples]


def _choices(likely: Any) -> Iterator[Any]:
    """The likely meaning first; then those in which all samples share some of the arguments, but not the first."""
    dims, structure = tree_flatten(likely, is_leaf=lambda dim: dim is None)
    _, *doubtful = (place for place, dim in enumerate(dims) if dim == 0)
    for chosen in itertools.product((0, None), repeat=len(doubtful)):
        changed = dict(zip(doubtful, chosen, strict=True))
        yield tree_unflatten([changed.get(place, dim) for place, dim in enumerate(dims)], structure)


@torch.no_grad()
def _gives_same(run: _Run, inputs: dict[str, Any], dims: Any) -> bool:
    """Whether a few samples alone, taken out of the arguments that way, give what they give among all."""
    whole = run.on_all(inputs)
    chosen = sorted({0, len(whole) // 2, len(whole) - 1})
    try:
        singly = [run.on_all(_sample(inputs, dims, i)) for i in chosen]
        difference = torch.cat(singly) - whole[chosen]
    except (RuntimeError, IndexError):
        return False
    rounding = 1e-3 if whole.dtype.itemsize >= 4 else 5e-2
    return bool(difference.float().norm() <= rounding * whole[chosen].float().norm())


def _sample(inputs: dict[str, Any], dims: Any, i: int) -> dict[str, Any]:
    """The arguments for one sample."""
    taken: dict[str, Any] = tree_map(lambda value, dim: value if dim is None else value[i : i + 1], inputs, dims)
    return taken


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
