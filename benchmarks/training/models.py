"""The models: small batches, so that a step on one core takes tenths of a second and its exchange counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.resnet import resnet50

WORDS = 10_000
"""Vocabulary of the language models."""


@dataclass(frozen=True)
class Task:
    """A model, what it is fed and how it is trained."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    """One rank's batch: input and target."""
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The forward pass."""
        given, target = batch
        return F.cross_entropy(model(given), target)


class LSTMLanguageModel(nn.Module):
    """Two layers of 650 (Zaremba et al., 2014, "medium"): 19.8 million parameters."""

    def __init__(self, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.words = nn.Linear(width, WORDS)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.words(self.lstm(self.embedding(given))[0].flatten(0, 1))


class Transformer(nn.Module):
    """Six causal layers of width 512 with tied embeddings: 24.1 million parameters."""

    def __init__(self, width: int = 512, layers: int = 6, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(given) + self.position, mask=self.mask, is_causal=True)
        return F.linear(x, self.embedding.weight).flatten(0, 1)


def mlp(*sizes: int) -> nn.Sequential:
    """Layers of these widths; by default four, with 23.0 million parameters."""
    sizes = sizes or (1024, 2880, 2880, 2880, 1200)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _images(*shape: int, classes: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(classes, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), labels

    return draw


def _text(count: int, length: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(WORDS, (count, length + 1), generator=generator)
        return words[:, :-1].contiguous(), words[:, 1:].flatten()

    return draw


_SGD = (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})

TASKS = {
    "mlp": Task(mlp, _images(16, 1024, classes=1200), *_SGD),
    "mlp-4m": Task(lambda: mlp(1024, 1440, 1440, 600), _images(16, 1024, classes=600), *_SGD),
    "lstm": Task(LSTMLanguageModel, _text(4, 20), *_SGD),
    "resnet50": Task(resnet50, _images(2, 3, 224, 224, classes=1000), *_SGD),
    "transformer": Task(Transformer, _text(2, 64), torch.optim.AdamW, {"lr": 1e-4}),
}
