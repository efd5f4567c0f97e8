"""Sketches by a hand-written GPU kernel where it applies; the plain path stays, and is what it is tested against.

It is used where `norms.triton` has kernels: on NVIDIA GPUs, with Triton, unless DIVEBATCH_TRITON=0 is set.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from divebatch.checks import warn_user
from divebatch.estimators.average import Norms
from divebatch.estimators.gradient_sketch import SignSketch
from divebatch.estimators.second_moment import Moment
from divebatch.estimators.step_gradients import StepGradients
from divebatch.norms import triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-4
"""Of the first comparison with the plain path, relative to the sketch's norm: sums in float32, in another order."""
MOST_LAYOUTS = 16
"""Kept for steps in which other parameters have gradients."""
Group = tuple[torch.dtype, torch.dtype | None]
"""Types of gradients and moments, which a kernel is made for."""


def sketch_of(signs: SignSketch, step: StepGradients, by_kernel: "ByKernel") -> tuple[Tensor, Norms]:
    """The sketch of a step's gradients and their exact squared norm, by the faster way.

    Where ranks hold shards, a collective: the sketch is the whole gradient's, the norm that of this rank's shards.
    """
    sketch, norm = by_kernel.of(step) if applies(signs, step) else signs.of(step)
    # Products of sums over ranks need the sums themselves: the numbers of one sketch travel in a step that measures.
    signs.shards.ranks.sum_([sketch])
    return sketch, norm


class ByKernel:
    """Takes the sketches of one `SignSketch` by the kernel.

    Nothing here waits for the device. Addresses of gradients are sent there only where they changed: under CUDA graphs
    they do not.
    """

    def __init__(self, signs: SignSketch) -> None:
        self._signs = signs
        self._layouts: dict[tuple[tuple[str, int, int], ...], tuple[Tensor, Tensor]] = {}
        self._addresses: dict[tuple[str, Group], tuple[list[int], Tensor]] = {}

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """As `SignSketch.of`."""
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
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return sketch_kernel.sketch(
                self._sent("gradients", types, gradients),
                None if means is None else self._sent("moments", types, means),
                None if moments is None else _factors(moments, device),
                layout,
                draws,
                self._signs.table,
                self._signs.size,
                types=types,
                unscale=step.unscale,
                scale=step.scale,
            )

    def _layout(self, pieces: tuple[tuple[str, int, int], ...]) -> tuple[Tensor, Tensor]:
        """Of pieces with name, number of the first entry and number of entries: each line's layout, and its draws."""
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
        """Their addresses on the device."""
        addresses = [each.data_ptr() for each in tensors]
        before = self._addresses.get((what, types))
        if before is None or before[0] != addresses:
            before = self._addresses[what, types] = (addresses, _send(torch.tensor(addresses), self._signs.device))
        return before[1]


def _factors(moments: Sequence[Moment], device: torch.device) -> Tensor:
    """(K, 3): how much of each moment a step keeps, its correction, and eps."""
    # The steps are counted on the device by some optimizers: reading them would wait for it.
    steps = torch.stack([each.step.reshape(()) for each in moments]).to(torch.float32) + 1
    known = torch.tensor([(each.decay, float(each.is_corrected), each.eps) for each in moments])
    known, steps = (each if each.device == device else _send(each, device) for each in (known, steps))
    corrections = torch.where(known[:, 1] > 0, 1 - known[:, 0] ** steps, 1.0)
    return torch.stack([known[:, 0], corrections, known[:, 2]], 1)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """From pinned memory, so that nobody waits."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def applies(signs: SignSketch, step: StepGradients) -> bool:
    """Whether the kernel can take the sketch of these gradients."""
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
    """Whether the kernel gives what the plain path gives on this device: it is looked at before its first use."""
    try:
        generator = torch.Generator().manual_seed(0)
        drawn = {str(n): torch.randn(n, generator=generator).to(device) for n in (5000, 3, 1024)}
        signs = SignSketch({name: nn.Parameter(each) for name, each in drawn.items()}, 1500, seed=0)
        is_close = _compared(signs, drawn, device)
        reason = "it gives another result"
    except Exception as error:  # whatever a compiler or a driver may raise: there is another way
        is_close, reason = False, f"{type(error).__name__}: {error}"
    if not is_close:
        warn_user(f"the sketch kernel does not work on {device} ({reason}): gradients are sketched by a slower way")
    return is_close


def _compared(signs: SignSketch, drawn: Mapping[str, Tensor], device: torch.device) -> bool:
    moments = {
        name: Moment(each.square() + 0.1, None, torch.tensor(7.0, device=device), 0.9, 1e-8, True)
        for name, each in drawn.items()
    }
    for divides in (None, moments):
        step = StepGradients(drawn, scale=0.5, grad_scale=4.0)
        step.moments = divides
        plain, (found, square) = signs.of(step)[0], ByKernel(signs).of(step)
        if not float((found - plain).norm()) <= TOLERANCE * float(plain.norm()):
            return False
        expected = sum(float(each.double().square().sum()) for _, each in step) * step.scale**2
        if not math.isclose(float(square), expected, rel_tol=TOLERANCE):
            return False
    return True
