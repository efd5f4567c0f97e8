"""Sketches of gradients: a few numbers each, whose products estimate those of the gradients.

A sketch S is linear, with random signs: E<Sg, Sh> = <g, h>, with a variance of at most (|g|^2 |h|^2 + <g, h>^2) / m for
sketches of m numbers. The coordinates of each parameter are cut into lines of m. Each line is multiplied with m signs
from a table of 2 m, from a random place on, and with a sign of its own; it is rotated by a random distance and added to
the sketch. Two coordinates of one line never meet, two of different lines meet with probability 1 / m, and the signs of
the lines make products unbiased. Sketches of shards add up.

On NVIDIA GPUs a Triton kernel reads each gradient once, unless DIVEBATCH_TRITON=0 is set. It is tested against the
plain way.
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
"""Numbers of a sketch below which gradients are rather kept whole: ||G||^2 is then off by 1.1 % (s.d.), while the
noise of the gradients leaves it uncertain by several percent over an epoch; see docs/estimators.md."""
MOST_SIZE = 2**20
SHARE = 0.01
"""The most that all sketches together take, as a share of the parameters' bytes."""
TABLE_LENGTHS = 2
"""Lengths of a sketch that the table of signs has."""
BYTES_PER_LINE = 48
"""Memory of each line: its draws and, on a GPU, where to find it."""
LONGEST_NORM = 2**20
"""Entries: in float32 the norm of 10^8 came out 1.1 % too small on a CPU."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernel reads."""
TOLERANCE = 1e-4
"""Relative to the norm of the sketch, in the first comparison with the plain way: float32 sums in another order."""
MOST_LAYOUTS = 16
"""Layouts that are kept, for steps in which other parameters have gradients."""
Group = tuple[torch.dtype, torch.dtype | None]
"""Types of gradients and moments, which a kernel is made for."""


def sketch_dtype(parameters: Collection[Tensor]) -> torch.dtype:
    """Return the type of a sketch of gradients of `parameters`: real, and at least float32."""
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
        size: Numbers of a sketch.
        seed: Determines all signs and rotations.
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
        """(lines, 3): how far a line is rotated, where its signs begin in the table, its own sign."""
        self.table = (draw(0, 2, (TABLE_LENGTHS * size,)) * 2 - 1).to(self.device, torch.int8)

    @property
    def relative_variance(self) -> float:
        """The largest variance of |SG|^2 / ||G||^2 over draws of the signs, for any G."""
        return 2 / self.size

    @property
    def num_bytes(self) -> int:
        """Memory of the signs and rotations."""
        return sum(each.numel() * each.element_size() for each in (self.draws, self.table))

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """Sketch a step's gradients or shards; returns the sketch and the norms of the gradients, which are exact."""
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
        """Add to `total` the sketch of `flat`, the entries of parameter `name` from the one numbered `start` on."""
        lines = range(start // self.size, -(-(start + len(flat)) // self.size)) if len(flat) else range(0)
        draws = self.draws[self.first_lines[name] + lines.start :][: len(lines)].tolist()
        for line, (rotation, place, sign) in zip(lines, draws, strict=True):
            begin, end = (min(max(at - start, 0), len(flat)) for at in (line * self.size, (line + 1) * self.size))
            first = start + begin - line * self.size  # where a shard begins within a line
            signs = self.table[place + first :][: end - begin].to(self.dtype)
            bucket = (rotation + first) % self.size
            turn = min(end - begin, self.size - bucket)
            total[bucket : bucket + turn].addcmul_(flat[begin : begin + turn], signs[:turn], value=sign * scale)
            if begin + turn < end:  # the rest begins anew
                total[: end - begin - turn].addcmul_(flat[begin + turn : end], signs[turn:], value=sign * scale)


class KernelSketch:
    """A `SignSketch` by the kernel.

    Nothing here waits for the device. Addresses of gradients are sent there only where they changed: under CUDA graphs
    they do not.
    """

    def __init__(self, signs: SignSketch) -> None:
        self._signs = signs
        self._layouts: dict[tuple[tuple[str, int, int], ...], tuple[Tensor, Tensor]] = {}
        self._addresses: dict[tuple[str, Group], tuple[list[int], Tensor]] = {}

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """Sketch like `SignSketch.of`."""
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
        """Lay out the lines of pieces (name, number of the first entry, number of entries), with their draws."""
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
    """Return (K, 3): how much of each moment a step keeps, its correction, and eps."""
    # The steps are counted on the device by some optimizers: reading them would wait for it.
    steps = torch.stack([each.step.reshape(()) for each in moments]).to(torch.float32) + 1
    known = torch.tensor([(each.decay, float(each.is_corrected), each.eps) for each in moments])
    known, steps = (each if each.device == device else _send(each, device) for each in (known, steps))
    corrections = torch.where(known[:, 1] > 0, 1 - known[:, 0] ** steps, 1.0)
    return torch.stack([known[:, 0], corrections, known[:, 2]], 1)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from pinned memory, so that nobody waits."""
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
    """Compare the kernel with the plain way on this device, before its first use."""
    generator, reason = torch.Generator().manual_seed(0), "it gives another result"
    drawn = {str(n): nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (5000, 3, 1024)}
    signs, step = SignSketch(drawn, 1500, seed=0), StepGradients(drawn, scale=0.5)
    plain = signs.of(step)[0]
    try:
        is_close = float((KernelSketch(signs).of(step)[0] - plain).norm()) <= TOLERANCE * float(plain.norm())
    except Exception as error:  # whatever a compiler or a driver may raise: there is another way
        is_close, reason = False, f"{type(error).__name__}: {error}"
    if not is_close:
        warn_user(f"the sketch kernel does not work on {device} ({reason}): gradients are sketched by a slower way")
    return is_close
