"""Lightning's Trainer with dgc's communication hook, registered by a callback.

torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py
"""

from __future__ import annotations

import lightning
import torch
from _digits import EPOCHS, digits, make_model, show, warmed_up
from torch import nn
from torch.utils.data import DataLoader

import dgc.torch as dgc


class CompressGradients(lightning.Callback):
    """As a callback: ``DDPStrategy(ddp_comm_hook=...)`` is skipped on a CPU, and comes before the optimizer."""

    def __init__(self, compression: dgc.DGCCompressor) -> None:
        self.compression = compression

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        state = dgc.ddp.CompressionState(self.compression, trainer.optimizers[0], pl_module.named_parameters())
        trainer.strategy.model.register_comm_hook(state, dgc.ddp.compression_hook)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)


def train(compression: dgc.DGCCompressor | None, epochs: int = EPOCHS) -> nn.Module:
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[] if compression is None else [CompressGradients(compression)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(digits()[0], batch_size=16, shuffle=True, drop_last=True))
    return model.net


if __name__ == "__main__":
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
