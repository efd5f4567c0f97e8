"""The loops of docs/own-loops.md, run before and after: each step's rate and samples against a count of our own."""

import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import divebatch
from divebatch import Auto, Decision, Measurement

PAGE = Path(__file__).parents[1] / "docs" / "own-loops.md"
DIFFS = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
)


PROCESSES = "Several processes"
LINES = {
    "Sequences of unequal length: a packed LSTM": 5,
    "bfloat16 and torch.compile": 5,
    "A stream that ends": 5,
    "A stream that never ends": 10,
    "A frozen backbone, unfrozen later": 5,
    "A GAN": 6,
    PROCESSES: 6,
    "Lightning": 6,
}
"""How many statements come, where that is not four: the import, the loader, the controller and its step."""
POLICIES = ("auto", "doubling")


class Doubling(Auto):
    """Grows for sure, and like Auto in all else."""

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=min(2 * seen.batch_size, seen.largest_batch_size, self.max_batch_size))


def program(diff: str, left_out: str) -> str:
    """The lines of a diff without those that begin with `left_out`."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(left_out))


def samples_of(value: Any) -> int:
    """Samples of one forward pass. Half of those of a discriminator are fakes; the generator's pass counts nothing."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if value.shape[1:] == (2,):
        return 0 if value.requires_grad else len(value) // 2
    return len(value)


def entrance(model: Any) -> Any:
    """The module whose calls are counted. Hugging Face calls its models by keywords, which global hooks do not see."""
    return model.transformer.wte if hasattr(model, "transformer") else model


@dataclass
class Watch:
    """What one program did, seen from outside: by global hooks of torch, and by what it printed."""

    rates: list[list[list[float]]] = field(default_factory=list)
    """At each step of its main optimizer, the rates of all groups of all its optimizers."""
    samples: list[int] = field(default_factory=list)
    """What each of these steps held."""
    ends: list[int] = field(default_factory=list)
    """How many steps were made when each record was printed."""
    records: list[Any] = field(default_factory=list)
    position: int | None = None
    """The scheduler's last position."""
    optimizer: Optimizer | None = None
    """The main one: the one that steps first."""

    @property
    def power(self) -> float:
        """By which the rate follows the batch size."""
        return 1.0 if isinstance(self.optimizer, torch.optim.SGD) else 0.5

    def run(self, code: str) -> "Watch":
        names: dict[str, Any] = {"print": self._printed, "__name__": "loop"}
        waiting = 0

        def forward(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            nonlocal waiting
            if not torch.compiler.is_compiling() and module is entrance(names.get("model")):
                waiting += samples_of(inputs[0])

        def steps(optimizer: Optimizer, *_: object) -> None:
            # The last hook before the step sees the rates that the step uses.
            if optimizer not in watched:
                watched.append(optimizer)
                optimizer.register_step_pre_hook(uses)

        def uses(optimizer: Optimizer, *_: object) -> None:
            self.optimizer = self.optimizer or optimizer
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if optimizer is self.optimizer:
                self.rates.append([rates])
            elif optimizer is names.get("generator_optimizer"):
                self.rates[-1].append(rates)

        def stepped(optimizer: Optimizer, *_: object) -> None:
            nonlocal waiting
            if optimizer is self.optimizer:
                self.samples.append(waiting)
                waiting = 0

        watched: list[Optimizer] = []
        handles = [
            register_module_forward_pre_hook(forward),
            register_optimizer_step_pre_hook(steps),
            register_optimizer_step_post_hook(stepped),
        ]
        try:
            exec(compile(code, str(PAGE), "exec"), names)
        finally:
            for handle in handles:
                handle.remove()
        self.position = names["scheduler"].last_epoch if "scheduler" in names else None
        return self

    def _printed(self, *records: Any, sep: str | None = None) -> None:
        self.records += records
        self.ends += [len(self.samples)] if sep is None else [record.steps for record in records]


def assert_as_meant(before: Watch, after: Watch, *, policy: str) -> None:
    """Each epoch comes in steps of the recorded size, each at the old program's rate times the factor for its size.

    `Auto` takes less of the factor, or none, where the rate would be above the schedule's highest.
    """
    first, epochs = before.samples[0], len(after.records)
    per_epoch = len(before.samples) // epochs
    total = sum(before.samples) // epochs
    begin = 0
    for epoch, (record, end) in enumerate(zip(after.records, after.ends, strict=True)):
        held = after.samples[begin:end]
        assert set(held[:-1]) <= {record.batch_size}
        assert 0 < held[-1] <= record.batch_size
        assert total - record.batch_size < sum(held) <= total  # less only where a short last batch is left out
        factor = (record.batch_size / first) ** after.power
        for step in range(begin, end):
            index = epoch * per_epoch + math.ceil(sum(after.samples[begin:step]) / first)
            own, taken = before.rates[index][0][0], factor
            if policy == "auto" and own > 1e-12:
                taken = after.rates[step][0][0] / own
                assert 1 - 1e-6 <= taken <= factor * (1 + 1e-6)
            meant = [[rate * taken for rate in groups] for groups in before.rates[index]]
            assert after.rates[step] == [pytest.approx(groups, rel=1e-6, abs=1e-12) for groups in meant]
        assert record.lr == pytest.approx(after.rates[begin][0][0])
        begin = end
    assert begin == len(after.samples)
    assert after.position == before.position


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning 2.6 on torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", sorted(DIFFS.keys() - {PROCESSES}))
def test_what_is_trained_is_what_was_meant(name, policy, monkeypatch, tmp_path):
    if (package := re.search(r"divebatch.integrations.(\w+)", DIFFS[name])) is not None:
        pytest.importorskip(package[1])
    if policy == "doubling":
        monkeypatch.setattr(divebatch, "Auto", Doubling)
    monkeypatch.chdir(tmp_path)  # some frameworks make folders
    before, after = Watch().run(program(DIFFS[name], "+")), Watch().run(program(DIFFS[name], "-"))
    assert_as_meant(before, after, policy=policy)
    if policy == "doubling":
        assert after.records[-1].batch_size >= 8 * after.records[0].batch_size


@pytest.mark.parametrize("name", DIFFS)
def test_few_lines_come(name):
    added = [line[1:] for line in DIFFS[name].splitlines() if line.startswith("+")]
    depth, statements = 0, 0
    for line in added:
        statements += depth == 0
        depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
    assert statements == LINES.get(name, 4)


def test_the_page_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "# new" in each)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    torch.manual_seed(0)
    whole = names["train"](6)
    torch.manual_seed(0)
    torch.save(names["train"](3), "half.pt")
    torch.manual_seed(1)  # nothing may hang on what the new process draws
    resumed = names["train"](6, torch.load("half.pt"))
    assert torch.equal(resumed["model"]["weight"], whole["model"]["weight"])
    assert resumed["control"]["loader"] == whole["control"]["loader"]


@pytest.mark.slow
def test_two_ranks_train_what_was_meant(tmp_path):
    before, after = run_ranks("+", tmp_path / "before"), run_ranks("-", tmp_path / "after")
    assert_as_meant(before, after, policy="doubling")
    assert after.records[-1].batch_size >= 8 * after.records[0].batch_size


def run_ranks(left_out: str, path: Path) -> Watch:
    """The program in two processes; its steps hold what both ranks saw."""
    # By torchrun, as people do: its own process holds the store, so that no rank leaves it behind.
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, __file__, left_out, str(path)], env=quiet, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    first, second = (pickle.loads(Path(f"{path}.{rank}").read_bytes()) for rank in "01")
    assert (first.rates, first.ends, first.records) == (second.rates, second.ends, second.records)
    return replace(first, samples=[sum(both) for both in zip(first.samples, second.samples, strict=True)])


def main(left_out: str, path: str) -> None:
    """One rank."""
    divebatch.Auto = Doubling  # type: ignore[misc]
    watch = Watch().run(program(DIFFS[PROCESSES], left_out))
    # Under its name and not as __main__, so that the test can read it.
    named = sys.modules["test_own_loops"] = sys.modules["__main__"]
    Watch.__module__ = named.__name__ = "test_own_loops"
    Path(f"{path}.{os.environ['RANK']}").write_bytes(pickle.dumps(watch))


if __name__ == "__main__":
    main(*sys.argv[1:])
