"""The noise scale in the logs of a plain Hugging Face Trainer."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

from divebatch import AdaptiveLoader, Fixed, NoiseMeter
from integrations.plain_loop import Course, Numbered
from integrations.trainer_runs import NUMBERED, Regression, adapter, arguments, trainer, transformers
from reference.per_sample import mean_loss, mlp

KEYS = ("noise_scale", "noise_scale_low", "noise_scale_high")


def readings(run: Any) -> dict[int, dict[str, float]]:
    logs = [row for row in run.state.log_history if "loss" in row]
    rows = {row["step"]: {key: row[key] for key in KEYS if key in row} for row in logs}
    return {step: row for step, row in rows.items() if row}


def momentum_sgd(model: Any) -> Any:
    return SGD(model.parameters(), lr=0.001, momentum=0.9)


def test_logs_have_what_a_meter_reads_in_a_loop(tmp_path):
    """In the order of our loader, so that a loop by hand sees the same: 16 samples a step, a reading in 24 steps."""
    model, callback = Regression(), adapter.NoiseScaleCallback(every_steps=24)
    settings: dict[str, Any] = {"optimizers": (momentum_sgd(model), None), "callbacks": [callback]}
    settings |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "logging_strategy": "no"}
    run = trainer(Fixed(), tmp_path, model=model, num_train_epochs=16, **settings)
    run.train()
    twin = mlp(dtype=torch.float32)
    optimizer = momentum_sgd(twin)
    loader, expected, step = AdaptiveLoader(Numbered(), 16, seed=3), {}, 0
    with NoiseMeter(optimizer) as meter:
        for _ in range(16):
            for _, x, y in loader:
                optimizer.zero_grad()
                mean_loss(twin(x), y).backward()
                optimizer.step()
                step += 1
                if step % 24 == 0:
                    found = meter.read(16)
                    expected[step] = dict(zip(KEYS, (found.value, found.low, found.high), strict=True))
    found = readings(run)
    assert list(found) == [24, 48]
    for step, row in found.items():
        assert row == pytest.approx({key: expected[step][key] for key in row}, rel=1e-3)
    assert any(set(row) == set(KEYS) for row in found.values())


def test_a_plain_trainer_is_left_as_it_is_and_its_reporters_are_told(tmp_path):
    class Reporter(transformers.TrainerCallback):
        """Stands before `callbacks=[...]`, as those of `report_to` do."""

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.rows.append(dict(logs))

    def plain(**settings: Any) -> Any:
        args = arguments(tmp_path, logging_strategy="steps", logging_steps=8, **settings)
        model = Regression()
        return transformers.Trainer(
            model=model, args=args, train_dataset=NUMBERED, optimizers=(momentum_sgd(model), None)
        )

    without, watched, reporter = plain(), plain(), Reporter()
    watched.callback_handler.callbacks.insert(0, reporter)
    adapter.NoiseScaleCallback().add_to(watched)
    for run in (without, watched):
        run.train()
    for here, there in zip(watched.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(here, there)
    assert list(readings(watched)) == [8, 16, 24, 32, 40]
    assert [{key: row[key] for key in KEYS if key in row} for row in reporter.rows if "loss" in row] == list(
        readings(watched).values()
    )
    assert not readings(without)
    assert not watched.optimizer.optimizer._optimizer_step_pre_hooks


def test_a_reading_has_one_batch_size(tmp_path, monkeypatch):
    """Where the adapter changes it, steps of the size before are left out of the next log."""
    readings: list[tuple[int, int]] = []

    def read(meter: Any, batch_size: int) -> Any:
        readings.append((batch_size, meter._steps))
        return original(meter, batch_size)

    original = NoiseMeter.read
    monkeypatch.setattr(NoiseMeter, "read", read)
    model = Regression()
    settings: dict[str, Any] = {"optimizers": (momentum_sgd(model), None), "logging_strategy": "steps"}
    settings |= {"num_train_epochs": 2, "logging_steps": 6, "callbacks": [adapter.NoiseScaleCallback()]}
    trainer(Course((6, 12)), tmp_path, model=model, **settings).train()
    assert readings == [(6, 6), (6, 2), (12, 4)]  # eight steps of 6 and four of 12, logged after 6 and 12
