"""The Hugging Face Trainer with a batch size that follows the gradients, on a tiny GPT-2 made on the spot.

Needs: pip install 'divebatch[transformers]'.
"""

from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.utils import logging

from divebatch import DiveBatch
from divebatch.integrations.transformers import BatchSizeTrainer

logging.set_verbosity_error()


def make_data() -> list[dict[str, torch.Tensor]]:
    """Sentences that count upwards from anywhere."""
    starts = torch.arange(128) % 16
    return [{"input_ids": (start + torch.arange(8)) % 16, "labels": (start + torch.arange(8)) % 16} for start in starts]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads only slow down a model this small
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=4,
            per_device_train_batch_size=2,
            learning_rate=5e-3,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = BatchSizeTrainer(  # was: Trainer(model=model, args=args, train_dataset=make_data())
            model=model,
            args=args,
            train_dataset=make_data(),
            policy=DiveBatch(delta=1.0, max_batch_size=64),
            lr_coupling="sqrt",
        )
        trainer.train()
    print(*trainer.records, sep="\n")


if __name__ == "__main__":
    main()
