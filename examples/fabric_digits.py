"""Lightning Fabric with dgc's communication hook, registered after ``setup()``.

torchrun --standalone --nproc-per-node 2 examples/fabric_digits.py
"""

from __future__ import annotations

from typing import Any

import torch
from _digits import EPOCHS, digits, make_model, show, warmed_up
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import dgc.torch as dgc


def train(
    compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, accumulate: int = 1, folder: str = "", start: int = 0
) -> nn.Module:
    """With a folder: save there after every epoch, and go on from the epoch ``start``."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    model, optimizer = fabric.setup(net, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if compression is not None:
        state["compression"] = dgc.ddp.register(model, optimizer, compression)
    if start:
        fabric.load(f"{folder}/{start}.ckpt", state)

    loader = fabric.setup_dataloaders(DataLoader(digits()[0], batch_size=16, shuffle=True, drop_last=True))
    for _ in range(start):
        next(iter(loader))  # Fabric shuffles by the number of times that the loader was iterated over
    for epoch in range(start, epochs):
        for i, (x, y) in enumerate(loader):
            more = (i + 1) % accumulate != 0
            with fabric.no_backward_sync(model, enabled=more):
                fabric.backward(nn.functional.cross_entropy(model(x), y))
            if not more:
                optimizer.step()
                optimizer.zero_grad()
        if folder:
            fabric.save(f"{folder}/{epoch + 1}.ckpt", state)
    return net


if __name__ == "__main__":
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
