"""Hugging Face Accelerate with dgc's communication hook, which is registered after ``prepare()``.

torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
"""

from __future__ import annotations

import torch
from _digits import EPOCHS, digits, make_model, show, warmed_up
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import dgc.torch as dgc


def train(compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, accumulate: int = 1) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(digits()[0], batch_size=16, shuffle=True, generator=order, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if compression is not None:
        state = dgc.ddp.CompressionState(compression, optimizer, model.module.named_parameters())
        model.register_comm_hook(state, dgc.ddp.compression_hook)

    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
    return accelerator.unwrap_model(model)


def main() -> None:
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main()
