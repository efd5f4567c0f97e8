"""Two real processes over gloo: each batch is shared, every sample comes once, and all decide the same."""

import json
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from divebatch.policies import NoiseDoubling
from integrations.plain_loop import GROWS_AND_SHRINKS, UNEVEN, each_once, uneven_course
from integrations.step_courses import NUM_TEXTS, BySteps, size_of, whole_steps

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


def assert_course_of_one_process(first: dict[str, Any], second: dict[str, Any], *, gamma: float) -> None:
    """Every sample once, exact gradients although shares are uneven, and what is measured is that of both."""
    assert each_once([mine + other for mine, other in zip(first["seen"], second["seen"], strict=True)], UNEVEN)
    records, weight = uneven_course(gamma)
    for answer in (first, second):
        assert answer["sizes"] == list(GROWS_AND_SHRINKS)
        assert answer["rates"] == pytest.approx([record.lr for record in records])
        assert answer["steps"] == records[-1].steps
        assert answer["diversities"] == pytest.approx([record.diversity for record in records], rel=1e-4)
        assert answer["weight"] == pytest.approx(weight, rel=1e-5)
    assert first["weight"] == second["weight"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
def test_two_processes_of_lightning_share_each_batch(tmp_path: Path):
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, second = answers("two_processes_lightning.py", str(tmp_path))
    assert_course_of_one_process(first, second, gamma=1.0)
    assert_passes_of_one_process(first, second)
    alone = import_module("integrations.two_processes_lightning").measured
    courses = {name: BySteps(sizes=(14, 35, 21)) for name in ("ranks", "per-sample")} | {"auto": NoiseDoubling(56)}
    for name, policy in courses.items():
        # Norms of ranks' shards, and their differences, are other estimates than those of one process.
        expected = alone(policy, "moments", processes=1)
        assert first[name] == second[name]
        assert first[name]["sizes"] == expected["sizes"]
        assert first[name]["weights"] == pytest.approx(expected["weights"], rel=1e-5)
        assert any(first[name]["diversities"])
        if name == "auto":
            assert first[name]["diversities"] == pytest.approx(expected["diversities"], rel=1e-3)
    assert len(first["noise"]["counted"]) == 2
    assert first["noise"]["counted"] == first["noise"]["told"] == second["noise"]["told"]


def assert_passes_of_one_process(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Steps of several passes, with decisions within epochs, saved in the middle of one and resumed."""
    expected = whole_steps(BySteps(), unit=6, batch_size=12, every_steps=4, steps=24)
    course = [[record.batch_size, record.steps, record.samples] for record in expected.records]
    for answer in (first, second):
        passes, resumed = answer["passes"], answer["resumed"]
        assert passes["course"] == course
        assert passes["weights"] == pytest.approx(size_of(expected.model), rel=1e-5)
        assert passes["schedule"] == resumed["schedule"] == 24
        assert resumed["weights"] == passes["weights"]
        assert resumed["course"] == course[-len(resumed["course"]) :]
        assert resumed["seen"] == passes["seen"][-len(resumed["seen"]) :]
    assert sorted(first["passes"]["seen"] + second["passes"]["seen"]) == sorted(3 * list(range(NUM_TEXTS)))


@pytest.mark.slow
def test_two_processes_of_accelerate_share_each_batch(tmp_path: Path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, second = answers("two_processes_accelerate.py", str(tmp_path))
    assert_course_of_one_process(first, second, gamma=0.5)
    assert_passes_of_one_process(first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_two_processes_of_the_hugging_face_trainer_share_each_batch(tmp_path):
    """The course of one process with passes as large as theirs together, by samples and by tokens."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from integrations import two_processes_transformers as script

    first, second = answers("two_processes_transformers.py", str(tmp_path))
    in_epoch = [sorted(first["seen"][23 * k : 23 * k + 23] + second["seen"][22 * k : 22 * k + 22]) for k in range(3)]
    assert each_once(in_epoch, script.SAMPLES)
    alone = {
        "numbers": script.numbers(tmp_path, per_device=4, lr_scheduler_type="linear"),
        "tokens": script.tokens(tmp_path, per_device=4),
        "chunks": script.chunks(tmp_path, passes=6),
    }
    for name, run in alone.items():
        run.train()
        assert_same_course(first[name], script.answer_of(run))
    for name in (*alone, "resumed"):
        assert first[name] == second[name]
    assert first["resumed"]["weights"] == first["numbers"]["weights"]
    assert_same_course(first["resumed"], {**first["numbers"], "records": first["numbers"]["records"][1:]})
    by_one = script.numbers(tmp_path, per_device=4, lr_scheduler_type="linear")
    by_one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_course(first["resumed"], script.answer_of(by_one))


def assert_same_course(two: dict[str, Any], one: dict[str, Any]) -> None:
    for here, there in zip(two["records"], one["records"], strict=True):
        decided = ("epoch", "batch_size", "steps", "samples", "lr", "next_lr", "next_batch_size")
        assert [here[name] for name in decided] == [there[name] for name in decided]
        assert measured(here) == pytest.approx(measured(there), rel=1e-4)
        assert measured(here)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-6)


def measured(record: dict[str, Any]) -> dict[str, float]:
    """Without what is not known: the noise may hide a gradient, and then bounds are all there is."""
    names = ("diversity", "noise_scale", "noise_scale_low", "noise_scale_high")
    return {name: record[name] for name in names if record[name] is not None}
