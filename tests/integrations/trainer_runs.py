"""What the tests of the Hugging Face adapter train: numbered samples, or a tiny GPT-2 on sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, EpochRecord, Policy
from divebatch.integrations.accumulation import InMultiples
from integrations.plain_loop import Numbered
from reference.per_sample import mean_loss, mlp

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
adapter = pytest.importorskip("divebatch.integrations.transformers")


class Regression(nn.Module):
    """A model of one's own: its loss is a mean over samples, which the Trainer divides by the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dtype=torch.float32)
        self.seen: list[int] = []

    def forward(self, number: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen += number.tolist()
        return {"loss": mean_loss(self.net(x), labels)}


NUMBERED = [{"number": number, "x": x, "labels": y} for number, x, y in (Numbered()[i] for i in range(48))]


def gpt2(*, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, **tokens))


def sentences(count: int = 24) -> list[dict[str, Tensor]]:
    """Of 4 to 12 tokens, padded."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(4, 13, (count,), generator=generator).tolist():
        ids, rest = torch.randint(0, 16, (length,), generator=generator), (0, 12 - length)
        mask = pad(torch.ones_like(ids), rest)
        rows.append({"input_ids": pad(ids, rest), "attention_mask": mask, "labels": pad(ids, rest, value=-100)})
    return rows


_NOT_ARGUMENTS = ("lr_coupling", "optimizers", "step_schedule", "eval_dataset", "estimator", "every_steps", "callbacks")


def arguments(folder: Path, **settings: Any) -> Any:
    """Passes of 2 samples, 3 of them a step at first."""
    usual = {"num_train_epochs": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    usual |= {"learning_rate": 0.03, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "seed": 3}
    usual |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    usual |= {"logging_strategy": "epoch", "dataloader_pin_memory": False}
    return transformers.TrainingArguments(output_dir=str(folder), **(usual | settings))


def trainer(
    policy: Policy, folder: Path, *, model: nn.Module | None = None, data: Any = NUMBERED, **settings: Any
) -> Any:
    """On the numbered samples unless told otherwise."""
    ours = {key: settings.pop(key) for key in _NOT_ARGUMENTS if key in settings}
    args = arguments(folder, **settings)
    return adapter.BatchSizeTrainer(model=model or Regression(), args=args, train_dataset=data, policy=policy, **ours)


def plain_course(
    policy: Policy, *, epochs: int = 5, samples: int = 48, unit: int = 2, batch_size: int = 6, **settings: Any
) -> tuple[list[EpochRecord], nn.Module]:
    """The same training by hand: its records, and the model it ends with."""
    model = mlp(dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.03)
    data = torch.utils.data.Subset(Numbered(), range(samples))
    loader, records = AdaptiveLoader(data, batch_size, seed=3), []
    with Controller(model, optimizer, loader, InMultiples(policy, unit), lr_coupling="linear", **settings) as control:
        for _ in range(epochs):
            for _, x, y in loader:
                optimizer.zero_grad()
                mean_loss(model(x), y).backward()
                optimizer.step()
            records.append(control.step())
    return records, model
