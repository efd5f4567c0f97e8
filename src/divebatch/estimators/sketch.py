"""Sketches of gradients: a few numbers each, whose products estimate the products of the gradients.

A sketch S is linear, with random signs: E<Sg, Sh> = <g, h>, with a variance of at most (|g|^2 |h|^2 + <g, h>^2) / m for
sketches of m numbers. The coordinates of each parameter are cut into lines of m. Each line is multiplied by m signs
from a table of 2 m, starting at a random place, and by a sign of its own. Then it is rotated by a random distance and
added to the sketch. Coordinates of one line never meet; those of different lines meet with probability 1 / m. The
lines' own signs make products unbiased. Sketches of shards add up.

On NVIDIA GPUs a Triton kernel reads each gradient once, unless DIVEBATCH_TRITON=0 is set. The kernel is tested against
the plain computation.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from divebatch.checks import warn_user
from divebatch.estimators.average import Norms
from divebatch.estimators.second_moment import SecondMoment, StepGradients
from divebatch.norms import triton
from divebatch.norms.sharded import Shards
from divebatch.norms.sketch import sum_dtype

LEAST_SIZE = 2**14
"""The number of entries below which gradients are kept whole instead: the error of ||G||^2 is then 1.1 % (s.d.), while
gradient noise makes it uncertain by several percent over an epoch; see docs/estimators.md."""
MOST_SIZE = 2**20
SHARE = 0.01
"""The most memory for all sketches together, as a fraction of the parameters' bytes."""
TABLE_LENGTHS = 2
"""The length of the table of signs, in lengths of a sketch."""
BYTES_PER_LINE = 48
"""Memory of each line: its draws and, on a GPU, its address."""
LONGEST_NORM = 2**20
"""The most entries in one norm: on a CPU in float32, the norm of 10^8 came out 1.1 % too small."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernel can read."""
TOLERANCE = 1e-4
"""The tolerance of the first comparison with the plain computation, relative to the sketch's norm."""
MOST_LAYOUTS = 16
"""The most layouts that are kept, for steps in which other parameters have gradients."""
Group = tuple[torch.dtype, torch.dtype | None]
"""Types of gradients and moments, for which a kernel is compiled."""


def sketch_dtype(parameters: Collection[Tensor]) -> torch.dtype:
    """Return the type for a sketch of gradients of `parameters`: real, and at least float32."""
    dtype = functools.reduce(torch.promote_types, (sum_dtype(p.dtype) for p in parameters))
    return dtype.to_real()


def fitting_size(parameters: Collection[nn.Parameter], *, sketches: int) -> int:
    """Return the largest power of two whose sketches take at most 1 % of the parameters' memory; 0 for none."""
    budget = SHARE * sum(p.numel() * p.element_size() for p in parameters)
    per_number = sketches * sketch_dtype(parameters).itemsize + TABLE_LENGTHS
    size = MOST_SIZE
    while size:
        lines = sum(-(-p.numel() // size) for p in parameters)
        if size * per_number + lines * BYTES_PER_LINE <= budget:
            break
        size //= 2
    return size


class SignSketch:
    """A linear map of gradients to `size` numbers.

    Args:
        parameters: The parameters whose gradients are sketched, by name.
        size: The number of entries in a sketch.
        seed: The seed of all signs and rotations.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], size: int, *, seed: int) -> None:
        self.size, self.seed, self.shards = size, seed, Shards(parameters)
        self.shards.require_rows()
        self.numels = {name: p.numel() * (2 if p.is_complex() else 1) for name, p in parameters.items()}
        self.device, self.dtype = next(iter(parameters.values())).device, sketch_dtype(parameters.values())
        self.first_lines: dict[str, int] = {}
        """The number of each parameter's first line."""
        lines = 0
        for name, numel in self.numels.items():
            self.first_lines[name] = lines
            lines += -(-numel // size)
        drawn = torch.Generator().manual_seed(seed)
        draw = functools.partial(torch.randint, generator=drawn, dtype=torch.int32, device="cpu")
        self.draws = torch.stack(
            [draw(0, size, (lines,)), draw(0, size + 1, (lines,)), draw(0, 2, (lines,)) * 2 - 1], 1
        )
        """(lines, 3): each line's rotation, the start of its signs in the table, and its own sign."""
        self.table = (draw(0, 2, (TABLE_LENGTHS * size,)) * 2 - 1).to(self.device, torch.int8)

    @property
    def relative_variance(self) -> float:
        """The largest variance of |SG|^2 / ||G||^2 over draws of the signs, for any G."""
        return 2 / self.size

    @property
    def num_bytes(self) -> int:
        """Memory of the signs and rotations, in bytes."""
        return sum(each.numel() * each.element_size() for each in (self.draws, self.table))

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """Sketch a step's gradients or shards; return the sketch and the exact norms of the gradients."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        norms: list[Tensor] = []
        for name, gradient in step:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            flat = real.to(self.device, self.dtype).reshape(-1)
            start = step.offsets.get(name, 0) * (2 if gradient.is_complex() else 1)
            self._add(total, flat, name, start=start, scale=step.scale)
            norms += torch._foreach_norm(flat.split(LONGEST_NORM))
        return total, torch.stack(norms) * abs(step.scale)

    def _add(self, total: Tensor, flat: Tensor, name: str, *, start: int, scale: float) -> None:
        """Add to `total` the sketch of `flat`, the entries of parameter `name` from number `start` on."""
        lines = range(start // self.size, -(-(start + len(flat)) // self.size)) if len(flat) else range(0)
        draws = self.draws[self.first_lines[name] + lines.start :][: len(lines)].tolist()
        for line, (rotation, place, sign) in zip(lines, draws, strict=True):
            begin, end = (min(max(at - start, 0), len(flat)) for at in (line * self.size, (line + 1) * self.size))
            first = start + begin - line * self.size  # the start of a shard within a line
            signs = self.table[place + first :][: end - begin].to(self.dtype)
            bucket = (rotation + first) % self.size
            turn = min(end - begin, self.size - bucket)
            total[bucket : bucket + turn].addcmul_(flat[begin : begin + turn], signs[:turn], value=sign * scale)
            if begin + turn < end:  # the rest wraps around
                total[: end - begin - turn].addcmul_(flat[begin + turn : end], signs[turn:], value=sign * scale)


class KernelSketch:
    """A `SignSketch` computed by the kernel.

    No method waits for the device. Addresses of gradients are sent there only after a change: under CUDA graphs they do
    not change.
    """

    def __init__(self, signs: SignSketch) -> None:
        self._signs = signs
        self._layouts: dict[tuple[tuple[str, int, int], ...], tuple[Tensor, Tensor]] = {}
        self._addresses: dict[tuple[str, Group], tuple[list[int], Tensor]] = {}

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """Sketch a step's gradients like `SignSketch.of`."""
        groups: dict[Group, list[str]] = {}
        for name, gradient in step.gradients.items():
            moment = None if step.moments is None else step.moments[name].mean.dtype
            groups.setdefault((gradient.dtype, moment), []).append(name)
        (total, square), *others = (self._group(step, types, names) for types, names in groups.items())
        for other, other_square in others:
            total, square = total + other, square + other_square
        return total, square

    def _group(self, step: StepGradients, types: Group, names: list[str]) -> tuple[Tensor, Tensor]:
        from divebatch.norms.triton import sketch_kernel  # needs triton, which comes with torch for GPUs

        gradients = [step.gradients[name].detach().contiguous() for name in names]
        pieces = ((name, step.offsets.get(name, 0), each.numel()) for name, each in zip(names, gradients, strict=True))
        layout, draws = self._layout(tuple(pieces))
        moments = None if step.moments is None else [step.moments[name] for name in names]
        means = None if moments is None else [each.mean.contiguous() for each in moments]
        device = self._signs.device
        sent = self._sent("gradients", types, gradients)
        sent_means = None if means is None else self._sent("moments", types, means)
        factors = None if moments is None else _factors(moments, device)
        arguments = sent, sent_means, factors, layout, draws, self._signs.table, self._signs.size
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return sketch_kernel.sketch(*arguments, types=types, unscale=step.unscale, scale=step.scale)

    def _layout(self, pieces: tuple[tuple[str, int, int], ...]) -> tuple[Tensor, Tensor]:
        """Return the lines of pieces (name, number of the first entry, number of entries), with their draws."""
        if pieces not in self._layouts:
            rows, lines, size = [], [], self._signs.size
            for index, (name, start, numel) in enumerate(pieces):
                for line in range(start // size, -(-(start + numel) // size)) if numel else ():
                    rows.append((index, line * size - start, numel))
                    lines.append(self._signs.first_lines[name] + line)
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = torch.tensor(rows, dtype=torch.int64).to(self._signs.device)
            self._layouts[pieces] = layout, self._signs.draws[lines].to(self._signs.device)
        return self._layouts[pieces]

    def _sent(self, what: str, types: Group, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors' addresses, on the device."""
        addresses = [each.data_ptr() for each in tensors]
        before = self._addresses.get((what, types))
        if before is None or before[0] != addresses:
            before = self._addresses[what, types] = (addresses, _send(torch.tensor(addresses), self._signs.device))
        return before[1]


def _factors(moments: Sequence[SecondMoment], device: torch.device) -> Tensor:
    """Return (K, 3): the fraction of each moment that a step keeps, its correction, and eps."""
    # Some optimizers count steps on the device: reading them would wait for it.
    steps = torch.stack([each.step.reshape(()) for each in moments]).to(torch.float32) + 1
    known = torch.tensor([(each.decay, float(each.is_corrected), each.eps) for each in moments])
    known, steps = (each if each.device == device else _send(each, device) for each in (known, steps))
    corrections = torch.where(known[:, 1] > 0, 1 - known[:, 0] ** steps, 1.0)
    return torch.stack([known[:, 0], corrections, known[:, 2]], 1)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from pinned memory, so that the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def applies(signs: SignSketch, step: StepGradients) -> bool:
    """Return whether the kernel can sketch these gradients."""
    if not triton.ENABLED or signs.device.type != "cuda" or signs.dtype != torch.float32:
        return False
    moments = [] if step.moments is None else [step.moments[name] for name in step.gradients]
    read = [*step.gradients.values(), *(each.mean for each in moments)]
    if any(each.is_sparse or each.dtype not in DTYPES or each.device != signs.device for each in read):
        return False
    # AMSGrad divides by a second number, which the kernel does not read.
    return all(each.largest is None for each in moments) and _agrees(signs.device)


@functools.cache
def _agrees(device: torch.device) -> bool:
    """Compare the kernel with the plain computation on this device, before its first use."""
    generator, reason = torch.Generator().manual_seed(0), "it gives another result"
    drawn = {str(n): nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (5000, 3, 1024)}
    signs, step = SignSketch(drawn, 1500, seed=0), StepGradients(drawn, scale=0.5)
    plain = signs.of(step)[0]
    try:
        is_close = float((KernelSketch(signs).of(step)[0] - plain).norm()) <= TOLERANCE * float(plain.norm())
    except Exception as error:  # a compiler or driver may raise anything, and the plain way works
        is_close, reason = False, f"{type(error).__name__}: {error}"
    if not is_close:
        warn_user(f"the sketch kernel does not work on {device} ({reason}): gradients are sketched by a slower way")
    return is_close
