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


def train(
    compression: dgc.DGCCompressor | None, epochs: int = EPOCHS, accumulate: int = 1, folder: str = "", start: int = 0
) -> nn.Module:
    """With a folder: save there after every epoch, and go on from the epoch ``start``."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator()
    loader = DataLoader(digits()[0], batch_size=16, shuffle=True, generator=order, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if compression is not None:
        state = dgc.ddp.register(model, optimizer, compression)
        accelerator.register_for_checkpointing(state)
    if start:
        accelerator.load_state(f"{folder}/{start}")

    for epoch in range(start, epochs):
        order.manual_seed(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()  # at the end: before backward() it would drop all micro-batches but the last
        if folder:
            if compression is not None:
                compression.average(optimizer)
            accelerator.save_state(f"{folder}/{epoch + 1}")
    return accelerator.unwrap_model(model)


def main() -> None:
    compression = warmed_up()
    show(train(compression), compression)
    compression.close()
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main()
