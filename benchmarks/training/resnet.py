"""ResNet-50 (He et al., 2015) in plain PyTorch: 161 tensors, 25.6 million parameters."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inside: int, planes: int, stride: int) -> None:
        super().__init__()
        outside = 4 * planes
        self.convolutions = nn.Sequential(
            *_normalised(inside, planes, 1),
            nn.ReLU(inplace=True),
            *_normalised(planes, planes, 3, stride),
            nn.ReLU(inplace=True),
            *_normalised(planes, outside, 1),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normalised(inside, outside, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def _normalised(inside: int, outside: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside)


def resnet50() -> nn.Sequential:
    """For images (N, 3, 224, 224) float32; returns (N, 1000)."""
    layers: list[nn.Module] = [*_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(width, planes, stride if block == 0 else 1))
            width = 4 * planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
