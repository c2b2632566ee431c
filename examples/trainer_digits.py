"""Hugging Face's Trainer with dgc's callback, which registers DDP's communication hook.

torchrun --standalone --nproc-per-node 2 examples/trainer_digits.py
"""

from __future__ import annotations

import tempfile

import torch
from _digits import EPOCHS, TRAIN_IMAGES, digits, make_model, show
from torch import nn
from transformers import Trainer, TrainingArguments

import dgc.torch as dgc
from dgc.torch.ddp import trainer_callback


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(
    compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, folder: str = "", checkpoint: str | None = None
) -> nn.Module:
    """With a folder: save there after every epoch."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    arguments = TrainingArguments(
        output_dir=folder or tempfile.gettempdir(), num_train_epochs=epochs, per_device_train_batch_size=16,
        use_cpu=True, ddp_backend="gloo", dataloader_drop_last=True, save_strategy="epoch" if folder else "no",
        logging_strategy="no", report_to=[],
        max_grad_norm=0.0,  # the Trainer clips otherwise, which error_feedback="classic" does not bear
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in digits()[0]]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    if compression is not None:
        trainer.add_callback(trainer_callback(trainer, compression))
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.net


if __name__ == "__main__":
    compression = dgc.Compression.dgc(steps=EPOCHS * (TRAIN_IMAGES // (2 * 16)))  # on two ranks
    show(train(compression), compression)
    compression.close()
