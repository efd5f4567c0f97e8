"""Run by test_processes.py in two processes: prints which samples this process saw, and the courses."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from integrations.plain_loop import Watched
from integrations.trainer_runs import NUMBERED, Regression, adapter, arguments, gpt2, sentences

SAMPLES = 45
"""The last pass of an epoch has one sample for two processes."""
SIZES = (12, 24, 8)


class Watching(adapter.BatchSizeTrainer):  # type: ignore[misc, name-defined]
    """Keeps which samples were trained here, without stand-ins."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if not self.train_loader.rank_shard.is_stand_in:
            self.seen = [*getattr(self, "seen", []), *inputs["number"].tolist()]
        return super().compute_loss(model, inputs, *rest, **named)


def numbers(folder: Path, *, per_device: int, **settings: Any) -> Any:
    """A mean over samples."""
    args = arguments(folder, num_train_epochs=3, per_device_train_batch_size=per_device, **settings)
    ours = {"policy": Watched(SIZES), "lr_coupling": "linear"}
    return Watching(model=Regression(), args=args, train_dataset=NUMBERED[:SAMPLES], **ours)


def tokens(folder: Path, *, per_device: int) -> Any:
    """A sum over the tokens of a step, divided by their number."""
    args = arguments(folder, num_train_epochs=3, per_device_train_batch_size=per_device)
    policy = Watched(SIZES)
    return adapter.BatchSizeTrainer(model=gpt2(), args=args, train_dataset=sentences(SAMPLES), policy=policy)


def chunks(folder: Path, *, passes: int) -> Any:
    """Compares the gradients of each two samples, which are a pass of one process."""
    args = arguments(folder, num_train_epochs=3, gradient_accumulation_steps=passes)
    policy = Watched(SIZES)
    return adapter.BatchSizeTrainer(
        model=Regression(), args=args, train_dataset=NUMBERED, policy=policy, estimator="ranks"
    )


def answer_of(run: Any) -> dict[str, Any]:
    weights = torch.cat([part.detach().flatten() for part in run.model.parameters()])
    return {"records": [asdict(record) for record in run.records], "weights": weights.tolist()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    run = numbers(folder, per_device=2, save_strategy="steps", save_steps=5, lr_scheduler_type="linear")
    run.train()
    resumed = numbers(folder, per_device=2, save_strategy="no", lr_scheduler_type="linear")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    of_tokens = tokens(folder, per_device=2)
    of_tokens.train()
    of_chunks = chunks(folder, passes=3)
    of_chunks.train()
    answer = {
        "seen": run.seen,
        "numbers": answer_of(run),
        "resumed": answer_of(resumed),
        "tokens": answer_of(of_tokens),
        "chunks": answer_of(of_chunks),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    run.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
