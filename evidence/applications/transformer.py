"""Language modelling: a small Transformer, trained by AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from evidence.application import Scale
from evidence.applications.language import Size, WordsTraining


class Transformer(nn.Module):
    """Causal layers with normalisation first, tied embeddings, learned positions (Radford et al. 2019)."""

    def __init__(self, size: Size, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.empty(size.length, size.width))
        layer = nn.TransformerEncoderLayer(size.width, heads, 4 * size.width, dropout, F.gelu, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, given: torch.Tensor, state: Any) -> tuple[torch.Tensor, None]:
        """Scores (t, b, vocabulary) of the words that follow ``given``, (t, b); there is no state."""
        length = len(given)
        x = self.embedding(given) + self.position[:length, None]
        x = self.layers(x, mask=self.mask[:length, :length], is_causal=True)
        return F.linear(x, self.embedding.weight), None


class TransformerLanguage(WordsTraining):
    """See ``evidence.application.Application``."""

    name: ClassVar[str] = "transformer"
    title: ClassVar[str] = "Language model, Transformer"
    lr: ClassVar[float] = 2e-3
    heads: ClassVar[int] = 4
    dropout: ClassVar[float] = 0.2
    clip: float | None = None
    sizes: ClassVar[dict[Scale, Size]] = {
        "full": Size(1000, 96, 2, 16, 16, 150_000, 1, 20, 1, 22_000),
        "quick": Size(2000, 64, 2, 16, 32, 22_500, 1, 4, 1, 6000),
        "tiny": Size(500, 32, 1, 8, 8, 1100, 1, 3, 1, 600),
    }

    def facts(self) -> dict[str, str]:
        """What the page says."""
        size = self.size
        return {
            "data": self.text_facts(),
            "model": f"{size.layers} Transformer layers of width {size.width} with {self.heads} heads, tied "
            f"embeddings, dropout {self.dropout:g}",
            "training": f"AdamW at a learning rate of {self.lr:g} that falls to 0 from three fifths of the steps on, "
            f"{size.streams} pieces of {size.length} words a step on all ranks together, {size.epochs} epochs; DGC "
            "corrects the first moment's momentum (0.9), and AdamW has a beta1 of 0 then; without the correction it is "
            "plain error feedback before AdamW",
        }

    def make_model(self) -> nn.Module:
        """A new network on the host."""
        return Transformer(self.size, self.heads, self.dropout)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)

    def rate(self, progress: float) -> float:
        """A short rise, and a straight fall from three fifths on."""
        return min(1.0, 0.05 + 20 * progress) * min(1.0, (1 - progress) / 0.4)


class ShortTransformer(TransformerLanguage):
    """The same on more text, once, in 1,536 steps, all of which still lower the loss."""

    name: ClassVar[str] = "transformer_short"
    title: ClassVar[str] = "Language model, Transformer, few steps"
    dropout: ClassVar[float] = 0.1
    sizes: ClassVar[dict[Scale, Size]] = {
        **TransformerLanguage.sizes,
        "full": Size(1000, 96, 2, 16, 16, 393_232, 16, 16, 1, 22_000),
    }
