"""The steps that the norms benchmark times: one model on one batch, plain and under meters."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from divebatch.norms import DiversityMeter
from divebatch.norms import triton as kernels
from models import PROBLEMS, Problem

Step = Callable[[], None]
KINDS = ("eager", "compiled", "graphs")
"""How the model runs: as it is, through the compiler, or through the compiler and replayed as CUDA graphs."""


class Setting:
    """One model on one batch, in one precision. All meters share the model, so that it is compiled once a variant."""

    def __init__(self, row: str, batch_size: int, device: str, precision: str, kind: str) -> None:
        self.problem: Problem = PROBLEMS[row]
        self.device, self.precision, self.compiled = device, precision, kind != "eager"
        torch.manual_seed(0)
        self.inputs, self.targets = (tensor.to(device) for tensor in self.problem.data(batch_size))
        self.channels_last = precision == "bf16" and self.inputs.ndim == 4
        if self.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        self.shared = self.model()
        mode = "reduce-overhead" if kind == "graphs" else "default"
        self.plain = self.step(self.shared, torch.compile(self.shared, mode=mode) if self.compiled else self.shared)
        self.clock: Callable[[], float] = time.perf_counter
        self._made: dict[object, Any] = {}

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.problem.build().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def cast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def step(self, model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        fused = True if self.device == "cuda" else None  # one launch, as the trainer has it
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)

        def step() -> None:
            optimizer.zero_grad()
            with self.cast():
                loss = self.problem.loss(run(self.inputs), self.targets)
            loss.backward()
            optimizer.step()

        return step

    def meter(self, mode: str, by_kernels: bool) -> DiversityMeter:
        """One for each variant the compiler has to make."""
        meter: DiversityMeter = self.once(
            (mode, by_kernels), lambda _: DiversityMeter(self.shared, mode=mode, compiled=self.compiled)
        )
        return meter

    def once(self, key: object, make: "Callable[[Setting], Any]") -> Any:
        """What `make` gave when the key was first met."""
        if key not in self._made:
            self._made[key] = make(self)
        return self._made[key]


@dataclass(frozen=True)
class Method:
    """A way to measure; its time is stated as a ratio to the method `base`."""

    mode: str
    gradient_sum: bool = False
    by_kernels: bool = True
    """With the hand-written GPU kernels (`norms/triton.py`) where they apply."""
    base: str = "plain"

    @contextmanager
    def running(self, setting: Setting) -> Iterator[Step]:
        """Inside, the shared model's steps measure."""
        meter = setting.meter(self.mode, self.by_kernels)
        meter.reset()  # its norms run alone too
        with kernels.switched(self.by_kernels), meter if self.gradient_sum else meter.norms:
            yield setting.plain

    def can_do(self, setting: Setting) -> bool:
        return setting.device == "cuda" or self.by_kernels  # else both are the same


@dataclass(frozen=True)
class Built:
    """A step of its own: the plain one, or a peer's, which wraps a model of its own."""

    build: Callable[[Setting], Step]
    base: str = "plain"

    @contextmanager
    def running(self, setting: Setting) -> Iterator[Step]:
        yield setting.once(self.build, self.build)

    def can_do(self, setting: Setting) -> bool:
        return True


PLAIN = Built(lambda setting: setting.plain)

METHODS: dict[str, Method] = {
    "exact": Method("exact"),
    "sketch": Method("sketch"),
    "exact + gradient sum": Method("exact", gradient_sum=True, base="exact"),
    "exact in plain torch": Method("exact", by_kernels=False),
    "sketch in plain torch": Method("sketch", by_kernels=False),
}
