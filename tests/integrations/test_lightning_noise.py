"""The noise scale in a plain Lightning Trainer: the meter's own readings, with the samples of its steps."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from divebatch import NoiseMeter
from divebatch.errors import ArgumentError
from integrations.plain_loop import Numbered
from reference.per_sample import mean_loss, mlp

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
NoiseScaleCallback = pytest.importorskip("divebatch.integrations.lightning").NoiseScaleCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Module(pl.LightningModule):
    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.net, self.momentum = mlp(dtype=torch.float32), momentum

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mean_loss(self.net(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.003, momentum=self.momentum)


def fit(callback: Any, module: nn.Module, loader: Any = None, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        callbacks=[callback], accelerator="cpu", **{"max_epochs": 6, "logger": False, **quiet, **settings}
    )
    trainer.fit(module, loader or DataLoader(Numbered(50), batch_size=4))
    return trainer


def by_hand(*, passes: int) -> list[Any]:
    """What the meter reads in a plain loop after each 10 steps; an epoch's last step is short."""
    net, readings, made = mlp(dtype=torch.float32), [], 0
    optimizer = SGD(net.parameters(), lr=0.003, momentum=0.9)
    with NoiseMeter(optimizer) as meter:
        for _ in range(6):
            batches = list(DataLoader(Numbered(50), batch_size=4))
            for at in range(0, len(batches), passes):
                optimizer.zero_grad()
                for _, x, y in batches[at : at + passes]:
                    (mean_loss(net(x), y) / passes).backward()
                optimizer.step()
                made += 1
                if made % 10 == 0:
                    readings.append(meter.read(4 * passes))
    return readings


@pytest.mark.parametrize("passes", [1, 2])
def test_readings_are_those_of_a_meter_in_a_plain_loop(passes: int, tmp_path: Path):
    callback = NoiseScaleCallback(every_steps=10)
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(callback, Module(), logger=logger, accumulate_grad_batches=passes, log_every_n_steps=7)
    expected = by_hand(passes=passes)
    assert len(expected) == (7 if passes == 1 else 4)
    assert callback.readings == expected
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [10 * (at + 1) for at in range(len(expected))]
    for key, values in {"_low": [r.low for r in expected], "": [r.value for r in expected]}.items():
        logged = [float(row[f"noise_scale{key}"] or "nan") for row in rows]
        assert logged == pytest.approx(values, nan_ok=True)
        assert any(value > 0 for value in values)


def test_a_reading_has_one_batch_size():
    """Twelve steps of 4 samples, then twelve of 8: the first two of these show that the size has changed."""
    _, x, y = next(iter(DataLoader(Numbered(8), batch_size=8)))
    batches = [(torch.arange(size), x[:size], y[:size]) for size in [4] * 12 + [8] * 12]
    callback = NoiseScaleCallback(every_steps=10)
    fit(callback, Module(), DataLoader(batches, batch_size=None), max_epochs=1)
    net, expected = mlp(dtype=torch.float32), {}
    optimizer = SGD(net.parameters(), lr=0.003, momentum=0.9)
    with NoiseMeter(optimizer) as meter:
        for made, (_, inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            mean_loss(net(inputs), targets).backward()
            optimizer.step()
            if made in (10, 14, 24):
                expected[made] = meter.read(len(inputs))
    assert callback.readings == [expected[10], expected[24]]


def test_a_batch_size_that_is_told_is_taken():
    counted, told = NoiseScaleCallback(every_steps=10), NoiseScaleCallback(every_steps=10, batch_size=8)
    for callback in (counted, told):
        fit(callback, Module())
    assert [r.low for r in told.readings] == pytest.approx([2 * r.low for r in counted.readings])


def test_the_training_is_left_as_it_was_and_the_hook_taken_off():
    modules = [Module(), Module()]
    trainers = [
        fit(callback, module) for callback, module in zip([NoiseScaleCallback(), pl.Callback()], modules, strict=True)
    ]
    assert all(torch.equal(*pair) for pair in zip(*(m.parameters() for m in modules), strict=True))
    assert not trainers[0].optimizers[0]._optimizer_step_pre_hooks


def test_batches_without_a_tensor_need_a_size():
    loader = DataLoader([["a", "b"]], batch_size=None)

    class Words(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(1, 4)).sum()

    with pytest.raises(ArgumentError, match=r"shows no tensor .* NoiseScaleCallback\(batch_size=...\)"):
        fit(NoiseScaleCallback(), Words(), loader)


def test_without_momentum_a_warning_says_what_is_missing():
    with pytest.warns(UserWarning, match="can only say how large the noise scale is at most"):
        fit(NoiseScaleCallback(), Module(momentum=0.0), max_epochs=1)
