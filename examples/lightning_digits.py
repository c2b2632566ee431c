"""Lightning's Trainer with dgc's callback, which registers DDP's communication hook.

torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py
"""

from __future__ import annotations

import lightning
import torch
from _digits import EPOCHS, digits, make_model, show, warmed_up
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import dgc.torch as dgc
from dgc.torch.ddp import lightning_callback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)


def train(
    compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, folder: str = "", checkpoint: str | None = None
) -> nn.Module:
    """With a folder: save there after every epoch."""
    model = Classifier()
    callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    if compression is not None:
        callbacks.append(lightning_callback(compression))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, logger=False,
        enable_checkpointing=bool(folder), enable_progress_bar=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, DataLoader(digits()[0], batch_size=16, shuffle=True, drop_last=True), ckpt_path=checkpoint)
    return model.net


if __name__ == "__main__":
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
