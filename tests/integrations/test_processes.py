"""Two real processes over gloo: each batch is shared, every sample comes once, and all decide the same."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, DiveBatch, Fixed
from divebatch.errors import ArgumentError
from divebatch.integrations.parts import share_between_processes
from integrations.plain_loop import GROWS_AND_SHRINKS, each_once

HERE = Path(__file__).parent


def in_two_processes(script: str, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """What torchrun would start, without its agent: half the start-up time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [finished(process) for process in processes]


def finished(process: "subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def answers(script: str, *arguments: str) -> list[dict[str, Any]]:
    done = in_two_processes(script, *arguments)
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    return [json.loads(process.stdout.splitlines()[-1]) for process in done]


def test_two_processes_of_lightning_share_each_batch():
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    first, second = answers("two_processes_lightning.py")
    assert each_once([mine + other for mine, other in zip(first["seen"], second["seen"], strict=True)])
    assert first["sizes"] == second["sizes"] == list(GROWS_AND_SHRINKS)
    assert first["rates"] == pytest.approx([0.1 * size / 6 for size in GROWS_AND_SHRINKS])
    assert first["steps"] == second["steps"] == sum(48 // size for size in GROWS_AND_SHRINKS)
    assert first["weight"] == second["weight"]


def test_two_processes_of_accelerate_share_each_batch():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    first, second = answers("two_processes_accelerate.py")
    assert each_once([mine + other for mine, other in zip(first["seen"], second["seen"], strict=True)])
    assert first["sizes"] == second["sizes"] == list(GROWS_AND_SHRINKS)
    assert first["rates"] == pytest.approx([0.1 * 0.5**n * size / 6 for n, size in enumerate(GROWS_AND_SHRINKS)])
    assert first["steps"] == second["steps"] == sum(48 // size for size in GROWS_AND_SHRINKS)
    assert first["weight"] == second["weight"]
    assert first["steps_of_a_prepared_scheduler"] == 2  # after one step: why it is refused
    assert "a prepared StepLR steps 2 times a step on 2 processes" in first["refusal"]


# The same sharing without processes


def local_numbers(loader: AdaptiveLoader, policy: Any, *, rank: int, num_processes: int) -> list[list[int]]:
    share_between_processes(loader, policy, rank=rank, num_processes=num_processes)
    return [numbers.tolist() for (numbers,) in loader]


def counting_loader(size: int, batch_size: int) -> AdaptiveLoader:
    return AdaptiveLoader(TensorDataset(torch.arange(size)), batch_size)


def test_the_parts_of_a_batch_make_up_the_batch_of_one_process():
    whole = [sorted(numbers.tolist()) for (numbers,) in counting_loader(45, 12)]
    parts = [local_numbers(counting_loader(45, 12), Fixed(), rank=rank, num_processes=3) for rank in range(3)]
    assert [sorted(a + b + c) for a, b, c in zip(*parts, strict=True)] == whole


def test_sizes_and_counts_stay_those_of_all_processes():
    loader = counting_loader(45, 12)
    local_numbers(loader, Fixed(), rank=1, num_processes=3)
    assert (loader.batch_size, loader.dataset_size, loader.samples_delivered) == (12, 45, 45)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ArgumentError, match="DiveBatch reads diversity, and sums over 2 processes are not built"):
        local_numbers(counting_loader(48, 6), DiveBatch(0.1, 24), rank=0, num_processes=2)
    with pytest.raises(ArgumentError, match="45 samples cannot be dealt out to 2 processes"):
        local_numbers(counting_loader(45, 6), Fixed(), rank=0, num_processes=2)
    with pytest.raises(ArgumentError, match="batch_size=5 cannot be shared by 2 processes"):
        local_numbers(counting_loader(48, 5), Fixed(), rank=0, num_processes=2)
