"""Image classification in PyTorch: a ResNet-20 on scans of digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from evidence.applications.digits import SIZES, DigitsTraining


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, inside, h, w) to (n, outside, h / stride, w / stride)."""
        return F.relu(self.convolutions(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A first convolution of stride 2, three stages of blocks, a linear layer: 20 layers with three blocks a stage."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inside = width
        for stage in range(3):
            outside = width << stage
            for block in range(blocks):
                layers.append(Block(inside, outside, 2 if stage and block == 0 else 1))
                inside = outside
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images (n, 1, 28, 28)."""
        return self.layers(images)


class Image(DigitsTraining):
    """See ``evidence.application.Application``."""

    name: ClassVar[str] = "image"
    title: ClassVar[str] = "Image classification, PyTorch"
    framework: ClassVar[Literal["torch", "keras"]] = "torch"
    weight_decay: ClassVar[float] = 5e-4

    def make_model(self) -> nn.Module:
        """A new network on the host."""
        size = SIZES[self.scale]
        return ResNet(size.width, size.blocks)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum SGD with weight decay."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)

    def batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[Any, ...]]:
        """This rank's share of the epoch's batches: images (b, 1, 28, 28), labels (b,)."""
        for images, labels in self.array_batches(epoch, rank, size):
            yield torch.from_numpy(images)[:, None], torch.from_numpy(labels)

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
        """Mean cross entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, rank: int, size: int) -> dict[str, tuple[float, float]]:
        """Right answers among this rank's test images, and the sum of their losses."""
        device = next(model.parameters()).device
        right = loss = 0.0
        images, labels = self.test_images[rank::size], self.test_labels[rank::size]
        for start in range(0, len(images), 250):
            part = torch.from_numpy(images[start : start + 250])[:, None].to(device)
            target = torch.from_numpy(labels[start : start + 250]).to(device)
            logits = model(part)
            right += float((logits.argmax(1) == target).sum())
            loss += float(F.cross_entropy(logits, target, reduction="sum"))
        return {"accuracy": (right, len(labels)), "test loss": (loss, len(labels))}
