"""Lightning Fabric with dgc's communication hook, registered after ``setup()``.

torchrun --standalone --nproc-per-node 2 examples/fabric_digits.py
"""

from __future__ import annotations

import torch
from _digits import EPOCHS, digits, make_model, show, warmed_up
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dgc.torch as dgc


def train(compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, accumulate: int = 1) -> nn.Module:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    model, optimizer = fabric.setup(net, optimizer)
    if compression is not None:
        state = dgc.ddp.CompressionState(compression, optimizer, net.named_parameters())
        wrapped = next(module for module in model.modules() if isinstance(module, DistributedDataParallel))
        wrapped.register_comm_hook(state, dgc.ddp.compression_hook)

    loader = fabric.setup_dataloaders(DataLoader(digits()[0], batch_size=16, shuffle=True, drop_last=True))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            more = (i + 1) % accumulate != 0
            with fabric.no_backward_sync(model, enabled=more):
                fabric.backward(nn.functional.cross_entropy(model(x), y))
            if not more:
                optimizer.step()
                optimizer.zero_grad()
    return net


if __name__ == "__main__":
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
