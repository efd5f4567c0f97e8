import ast
import json
import sys
import types
from pathlib import Path

import pytest

import divebatch
from divebatch.errors import MissingExtraError
from divebatch.lab import Run, execute
from divebatch.lab.loggers import LOGGERS, logging_to, make_logger, scalars
from divebatch.records import EpochRecord, RunHeader, read_run
from lab.helpers import kill_after, shrunk

HEADER = RunHeader(experiment="e", method="m", seed=3, config={"epochs": 2})


def tiny_run(folder, *loggers: str) -> Run:
    return Run(shrunk("synthetic-convex", 3, 100, 4), "divebatch", 0, folder, loggers=loggers)


def record(epoch: int = 1, **values) -> EpochRecord:
    return EpochRecord(epoch=epoch, batch_size=16, lr=0.1, steps=5, samples=80, **values)


class Listener:
    """Notes every call."""

    def __init__(self, calls: list, *, fails_at: int | None = None):
        self.calls, self.fails_at = calls, fails_at

    def start(self, header, folder, *, epochs_done):
        self.calls.append(("start", header.method, folder.name, epochs_done))

    def log(self, record):
        if record.epoch == self.fails_at:
            raise OSError("no space left")
        self.calls.append(record.epoch)

    def close(self):
        self.calls.append("close")


@pytest.fixture
def calls(monkeypatch):
    noted: list = []
    monkeypatch.setitem(LOGGERS, "listener", lambda: Listener(noted))
    return noted


def test_a_logger_hears_of_start_every_epoch_and_end(tmp_path, calls):
    execute(tiny_run(tmp_path, "listener"))
    assert calls == [("start", "divebatch", "seed-0", 0), 1, 2, 3, "close"]


def test_a_resumed_run_goes_on_where_it_stood(tmp_path, calls):
    kill_after(tiny_run(tmp_path, "listener"), 2)
    assert calls[-1] == "close"
    calls.clear()
    execute(tiny_run(tmp_path, "listener"), resume=True)
    assert calls == [("start", "divebatch", "seed-0", 2), 3, "close"]
    calls.clear()
    execute(tiny_run(tmp_path, "listener"), resume=True)
    assert calls == []


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(tmp_path, calls, monkeypatch):
    failing: list = []
    monkeypatch.setitem(LOGGERS, "failing", lambda: Listener(failing, fails_at=2))
    run = tiny_run(tmp_path, "failing", "listener")
    with pytest.warns(UserWarning, match="logger 'failing' failed and is left out: OSError: no space left"):
        execute(run)
    assert failing == [("start", "divebatch", "seed-0", 0), 1]
    assert calls[1:] == [1, 2, 3, "close"]
    assert len(read_run(run.records_path)[1]) == 3


def test_only_what_was_measured_is_shown():
    assert scalars(record()) == {"batch/size": 16, "lr": 0.1, "progress/steps": 5, "progress/samples": 80}
    assert scalars(record(val_accuracy=0.0, diversity=0.5))["val/accuracy"] == 0.0
    language = scalars(record(bits_per_byte=2.5, noise_scale=80.0))
    assert (language["val/bits_per_byte"], language["batch/noise_scale"]) == (2.5, 80.0)


# TensorBoard


def events(folder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_the_records_hold_also_after_a_resume(tmp_path):
    run = tiny_run(tmp_path, "tensorboard")
    kill_after(run, 2)
    execute(run, resume=True)
    shown = events(tmp_path / "synthetic-convex" / "divebatch" / "seed-0")
    _, epochs = read_run(run.records_path)
    for tag, field in (
        ("val/accuracy", "val_accuracy"),
        ("batch/size", "batch_size"),
        ("batch/diversity", "diversity"),
    ):
        assert shown[tag] == {each.epoch: pytest.approx(getattr(each, field)) for each in epochs}


def test_without_tensorboard_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"divebatch\[tensorboard\]"):
        make_logger("tensorboard")


# Weights & Biases, by a module that stands in for it


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.calls = []

    class TheirRun:
        def log(self, values, *, step):
            module.calls.append(("log", step, json.loads(json.dumps(values))))

        def finish(self):
            module.calls.append(("finish",))

    def init(**settings):
        module.calls.append(("init", settings))
        return TheirRun()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_gets_one_run_for_each_of_ours(tmp_path, wandb):
    with logging_to(["wandb"], HEADER, tmp_path / "seed-3", epochs_done=0) as log:
        log(record(1, val_accuracy=0.5))
        log(record(2))
    (first, settings), *logged, last = wandb.calls
    assert (first, last) == ("init", ("finish",))
    assert settings["project"] == "divebatch"
    assert (settings["group"], settings["name"]) == ("e", "m seed 3")
    assert settings["config"] == {"epochs": 2}
    assert settings["resume"] is None
    assert [(step, values.get("val/accuracy")) for _, step, values in logged] == [(1, 0.5), (2, None)]


def test_wandb_resumes_the_run_it_had(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for epochs_done in (0, 5):
        with logging_to(["wandb"], HEADER, tmp_path / "seed-3", epochs_done=epochs_done):
            pass
    first, second = (settings for name, *rest in wandb.calls if name == "init" for settings in rest)
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert second["project"] == "mine"
    with logging_to(["wandb"], HEADER, tmp_path / "elsewhere" / "seed-3", epochs_done=0):
        pass
    assert wandb.calls[-2][1]["id"] != first["id"]


def test_optional_packages_are_imported_inside_functions_only():
    package = Path(divebatch.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names} | {"tensorboard" for name in names if "utils.tensor" in name}
            assert not roots & {"wandb", "tensorboard", "optuna", "sqlalchemy"}, path
