"""The forms in which a rule may state the samples' gradients for one parameter.

Shapes: B samples, T positions of a sample, O rows and I columns of a weight matrix. No form needs the whole (B, *shape)
tensor of all gradients, except the form that is this tensor. Temporary tensors are formed in chunks of samples.
Gradients of several calls, or of several layers that share the parameter, add up before squaring: `total`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from divebatch.norms import triton
from divebatch.norms.sketch import Estimate, estimate, project, sum_dtype, summed

CHUNK_BYTES = 16 * 2**20
"""The most memory for temporary tensors; samples are processed in chunks below this size."""
COMPILED_CHUNK_BYTES = 256 * 2**20
"""The same bound inside a compiled model, where fewer and larger chunks compile and run faster."""
CHUNK_FRACTION = 0.03
"""The bound on a GPU, as a fraction of the memory allocated when the backward pass begins, if that is larger."""
CACHE_BYTES = 2**20
"""A fraction of a CPU's cache: temporary tensors of this size are still in the cache when they are read again."""

# A cache for the process, by device: reading the allocated memory takes longer than a small layer's norms.
_gpu_caps: dict[torch.device, int] = {}


class Form:
    """One parameter's gradients, one per sample."""

    __slots__ = ()
    left: Tensor
    """The first factor of each gradient, (B, ...), if the form has one."""

    def sq_norms(self) -> Tensor:
        """Return each sample's squared norm, (B,)."""
        raise NotImplementedError

    def sketch(self, *, seed: Tensor | None = None) -> Estimate:
        """Estimate each sample's squared norm with new random signs; exact if nothing cheaper exists.

        `seed` is a number on the device, (1,), from which a GPU kernel may draw the signs, which is faster.
        """
        return Estimate(self.sq_norms(), None)

    def explicit(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, (b, *parameter shape)."""
        raise NotImplementedError

    def summed(self) -> Tensor:
        """Return the sum over all samples, with as many entries as the parameter: the gradient of the batch."""
        raise NotImplementedError

    @property
    def num_samples(self) -> int:
        """The number of samples, B."""
        return self.left.shape[0]


class Explicit(Form):
    """The gradients themselves, for parameters that are small beside the activations (biases, norm layers)."""

    __slots__ = ("_known", "gradients")

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients  # (B, *parameter shape)
        self._known: Tensor | None = None

    def sq_norms(self) -> Tensor:
        if self._known is None:  # computed once: a weight's `Outer` may need the norms of its bias
            self._known = sq_norms_of_rows(self.gradients if self.gradients.ndim == 2 else self.gradients.flatten(1))
        return self._known

    def explicit(self, samples: slice) -> Tensor:
        return self.gradients[samples]

    def summed(self) -> Tensor:
        return self.gradients.sum(0, dtype=sum_dtype(self.gradients.dtype))

    @property
    def num_samples(self) -> int:
        return self.gradients.shape[0]


@dataclass(slots=True)
class Outer(Form):
    """A weight matrix's gradients as sums over positions of outer products: sum_t left_t right_t^T."""

    left: Tensor
    """The left factors: (B, O) for a single position, else (B, ..., O)."""
    right: Tensor
    """The right factors: (B, I) for a single position, else (B, ..., I)."""
    rows: Explicit | None = None
    """`left` as its own form, if its norms are also needed elsewhere."""
    with_bias: bool = False
    """Whether the bias is counted too; only kernels do this (`joined`)."""

    def sq_norms(self) -> Tensor:
        """Return squared norms by the cheapest of three equivalent ways."""
        if self.left.ndim == 2:  # rank one: ||left right^T|| = ||left|| ||right||
            left = sq_norms_of_rows(self.left) if self.rows is None else self.rows.sq_norms()
            return sq_norms_of_rows(self.right).mul_(left)
        left, right = same_dtype(positions(self.left), positions(self.right))
        if triton.applies_exactly(left, right):
            return triton.outer_sq_norms(left, right, with_bias=self.with_bias)
        return sq_norms_of_products(left, right)

    def sketch(self, *, seed: Tensor | None = None) -> Estimate:
        """Estimate by one vector-matrix product per half; exact for a single position, where this is as cheap."""
        if self.left.ndim == 2:
            return Estimate(self.sq_norms(), None)
        left, right = same_dtype(positions(self.left), positions(self.right))
        if left.shape[2] > 1 and triton.applies(left, right):
            return triton.outer_sketch(left, right, seed=seed, with_bias=self.with_bias)
        return estimate(torch.bmm(project(left.mT), right))

    def explicit(self, samples: slice) -> Tensor:
        left, right = same_dtype(positions(self.left[samples]), positions(self.right[samples]))
        return left.mT @ right

    def summed(self) -> Tensor:
        left, right = same_dtype(self.left, self.right)
        return left.flatten(0, -2).mT @ right.flatten(0, -2)


@dataclass(slots=True)
class RowSums(Form):
    """The gradients of a bias: sums over positions of the weight's `left` factors (B, ..., O)."""

    left: Tensor

    def sq_norms(self) -> Tensor:
        return sq_norms_of_rows(self.explicit(slice(None)))

    def explicit(self, samples: slice) -> Tensor:
        return positions(self.left[samples]).sum(1)

    def summed(self) -> Tensor:
        return self.left.flatten(0, -2).sum(0, dtype=sum_dtype(self.left.dtype))


@dataclass(slots=True)
class Stacked(Form):
    """The gradients of a parameter whose rows come in blocks, each with its own form."""

    blocks: Sequence[Form]

    def sq_norms(self) -> Tensor:
        return torch.stack([block.sq_norms() for block in self.blocks]).sum(0)

    def sketch(self, *, seed: Tensor | None = None) -> Estimate:
        """Add up the blocks' sketches; their signs are independent, so variances add too."""
        return summed([block.sketch() for block in self.blocks])

    def explicit(self, samples: slice) -> Tensor:
        return torch.cat([block.explicit(samples) for block in self.blocks], 1)

    def summed(self) -> Tensor:
        return torch.cat([block.summed() for block in self.blocks])

    @property
    def num_samples(self) -> int:
        return self.blocks[0].num_samples


def measured(forms: Sequence[Form], mode: str, *, seed: Tensor | None = None) -> list[Estimate]:
    """Measure one call's gradients in the given mode; signs may be drawn from `seed`."""
    if len(forms) == 2 and isinstance(forms[0], RowSums):
        forms = joined(forms, mode)
    estimates = []
    for number, form in enumerate(forms):
        if mode == "sketch":  # another seed for each form of a call
            estimates.append(form.sketch(seed=seed + number if seed is not None and number else seed))
        else:
            estimates.append(Estimate(form.sq_norms(), None))
    return estimates


def joined(forms: Sequence[Form], mode: str) -> Sequence[Form]:
    """Return one form for a weight and its bias if a kernel counts both while it reads `left` once."""
    bias, weight = forms
    if not isinstance(bias, RowSums) or not isinstance(weight, Outer) or bias.left is not weight.left:
        return forms
    if mode == "sketch":  # a single row is its own exact sketch, for which there is no kernel
        is_counted = weight.left.shape[-1] > 1 and triton.applies(weight.left, weight.right)
    else:
        is_counted = triton.applies_exactly(weight.left, weight.right)
    return [replace(weight, with_bias=True)] if is_counted else forms


def total(forms: Sequence[Form]) -> Tensor:
    """Return squared norms of the sum of several forms of one parameter, (B,)."""
    if len(forms) == 1:
        return forms[0].sq_norms()
    outers = [form for form in forms if isinstance(form, Outer)]
    if len(outers) == len(forms):  # several calls equal one call with more positions
        left = torch.cat([positions(form.left) for form in outers], 1)
        return Outer(left, torch.cat([positions(form.right) for form in outers], 1)).sq_norms()
    first = forms[0].explicit(slice(0, 1))
    step = chunk_size(first, (len(forms) + 1) * first.numel())
    squares = []
    for start in range(0, forms[0].num_samples, step):
        chunk = torch.stack([form.explicit(slice(start, start + step)) for form in forms]).sum(0)
        squares.append(sq_norms_of_rows(chunk.flatten(1)))
    return torch.cat(squares)


def positions(x: Tensor) -> Tensor:
    """Reshape (B, I) to (B, 1, I), and (B, ..., I) to (B, T, I)."""
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def same_dtype(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both tensors to the lower precision of the two, which is that of autocast."""
    if left.dtype == right.dtype:
        return left, right
    lower = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return left.to(lower), right.to(lower)


def with_room(x: Tensor) -> Tensor:
    """Return `x` in a type that can hold products of its entries; in float16 those of a scaled loss overflow."""
    return x.float() if x.dtype == torch.float16 else x


def sq_norms_of_rows(x_BD: Tensor) -> Tensor:
    """Return squared norms, (B,), at least float32. vector_norm makes no copy, as x.square().sum(1) would."""
    dtype = sum_dtype(x_BD.dtype) if x_BD.dtype.itemsize < 4 else None  # naming the tensor's own type costs time
    norms: Tensor = torch.linalg.vector_norm(x_BD, dim=1, dtype=dtype)
    return norms.square_()


def chunk_size(tensor: Tensor, entries_per_sample: int) -> int:
    """Return the number of samples per chunk, for the given number of temporary entries per sample."""
    return max(1, _memory_cap(tensor.device) // (entries_per_sample * tensor.element_size()))


def cached_chunk(tensor: Tensor, entries_per_sample: int) -> int:
    """Return the number of samples that fit into a CPU's cache; all samples inside a compiler."""
    if torch.compiler.is_compiling():
        return len(tensor)
    if tensor.device.type != "cpu":
        return chunk_size(tensor, entries_per_sample)
    return max(1, CACHE_BYTES // (entries_per_sample * tensor.element_size()))


def in_chunks(kernel: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, chunk: int) -> Tensor:
    """Apply the kernel to the pairs of all samples, `chunk` samples at a time."""
    if chunk >= len(left):
        return kernel(left, right)
    pairs = zip(left.split(chunk), right.split(chunk), strict=True)
    return torch.cat([kernel(*pair) for pair in pairs])


def forget_memory_caps() -> None:
    """Read the GPUs' allocated memory again when the next bound is needed."""
    _gpu_caps.clear()


def _memory_cap(device: torch.device) -> int:
    if torch.compiler.is_compiling():  # a constant for the compiler
        return COMPILED_CHUNK_BYTES
    if device.type != "cuda":
        return CHUNK_BYTES
    if device not in _gpu_caps:
        _gpu_caps[device] = max(CHUNK_BYTES, int(CHUNK_FRACTION * torch.cuda.memory_allocated(device)))
    return _gpu_caps[device]


def sq_norms_of_products(left_BTO: Tensor, right_BTI: Tensor) -> Tensor:
    """Return ||left^T right||^2 for each pair of matrices, (B,)."""
    num_positions, num_entries = left_BTO.shape[1], left_BTO.shape[2] * right_BTI.shape[2]
    # The Gram form costs T^2 (I + O) per sample, the gradient itself T I O.
    if num_positions * (left_BTO.shape[2] + right_BTI.shape[2]) < num_entries:
        return in_chunks(_by_gram, left_BTO, right_BTI, chunk_size(left_BTO, 2 * num_positions**2))
    return in_chunks(_by_gradient, left_BTO, right_BTI, chunk_size(left_BTO, num_entries))


def _by_gram(left_BTO: Tensor, right_BTI: Tensor) -> Tensor:
    """Return ||sum_t left_t right_t^T||^2 as the sum over t, s of (left_t . left_s) (right_t . right_s)."""
    left_BTO, right_BTI = with_room(left_BTO), with_room(right_BTI)
    products = (left_BTO @ left_BTO.mT).mul_(right_BTI @ right_BTI.mT)
    return products.sum((1, 2), dtype=sum_dtype(products.dtype))


def _by_gradient(left_BTO: Tensor, right_BTI: Tensor) -> Tensor:
    return sq_norms_of_rows((left_BTO.mT @ right_BTI).flatten(1))
