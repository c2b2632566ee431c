"""Data and model of the examples of DDP's communication hook: scikit-learn's scanned digits, and a small CNN."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import dgc.torch as dgc

TRAIN_IMAGES = 898
EPOCHS = 20


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set: (n, 1, 8, 8) images and their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    return TensorDataset(x[:TRAIN_IMAGES], y[:TRAIN_IMAGES]), TensorDataset(x[TRAIN_IMAGES:], y[TRAIN_IMAGES:])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def warmed_up() -> dgc.DGCCompressor:
    """A compressor that sends 0.1 % of the gradient after a warm-up of two epochs."""
    return dgc.Compression.dgc(sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999], rampup_step=56)


def show(model: nn.Module, compression: dgc.DGCCompressor) -> None:
    x, y = digits()[1].tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {100 * accuracy:.2f} %, {compression.stats.last.ratio:.0f} times fewer bytes in the last step")
