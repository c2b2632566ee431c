"""Plain DDP under torchrun, with dgc's communication hook.

torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from _digits import EPOCHS, digits, make_model, show, warmed_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import dgc.torch as dgc


def train(compression: dgc.DGCCompressor | None, epochs: int = EPOCHS) -> nn.Module:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    if compression is not None:
        dgc.ddp.register(model, optimizer, compression)

    train_set, _ = digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.module


def main() -> None:
    dist.init_process_group("gloo")
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
