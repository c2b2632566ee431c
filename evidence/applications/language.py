"""Language modelling: two layers of LSTM, and what every language model here shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from evidence.application import Metric, Scale
from evidence.data.text import prepare_words, streams, words

PIECES = 32
"""The held-out words are read in so many pieces beside each other; more ranks than that have none."""


@dataclass(frozen=True)
class Size:
    """How large a training is."""

    vocabulary: int
    width: int
    layers: int
    length: int
    """Words that a gradient reaches back."""
    streams: int
    """Pieces of the text that are read beside each other, on all ranks together."""
    words: int
    """The most that are trained on: the first of the text."""
    parts: int
    """An epoch is one of so many parts of the words, taken from each stream, in turn."""
    epochs: int
    rampup_epochs: int
    tested: int
    """The most words to test on."""


class WordsTraining:
    """The members of an application that all language models share."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("perplexity", "lower", exponential=True),)
    framework: ClassVar[Literal["torch", "keras"]] = "torch"
    ranks: ClassVar[int] = 4
    sizes: ClassVar[dict[Scale, Size]]
    carries: ClassVar[bool] = False
    """Whether a state goes from each batch to the next, which follows it in the text."""

    def __init__(self, scale: Scale, seed: int) -> None:
        """Load the text."""
        self.scale, self.seed = scale, seed
        self.size = self.sizes[scale]
        self.epochs, self.rampup_epochs = self.size.epochs, self.size.rampup_epochs
        found = words(self.size.vocabulary)
        self._source = str(found["source"])
        self._train = torch.from_numpy(streams(found["train"][: self.size.words], self.size.streams))
        self._test = torch.from_numpy(found["test"][: self.size.tested])
        self._state: Any = None

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed; Python's own documentation takes the text's place where it is missing."""
        return None

    @classmethod
    def prepare(cls, scale: Scale) -> None:
        """Build the words into the cache."""
        prepare_words(cls.sizes[scale].vocabulary)

    def text_facts(self) -> str:
        """What the page says of the data."""
        return (
            f"{self._source}: {self._train.numel():,} words and marks to train on, "
            f"{len(self._test):,} of other chapters to test on, {self.size.vocabulary:,} of them told apart; "
            f"an epoch is {'all' if self.size.parts == 1 else f'1/{self.size.parts}'} of them"
        )

    def steps(self, size: int) -> int:
        """Steps of an epoch."""
        return (self._train.shape[1] - 1) // self.size.parts // self.size.length

    def batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[Any, ...]]:
        """This rank's streams of one part of the text: words (length, b), and those that follow them."""
        self._state = None
        # Which stream lies on which rank changes with each pass over the text, and with the seed.
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch // self.size.parts)
        order = torch.randperm(self.size.streams, generator=generator)
        own = self._train[order[rank * self.size.streams // size : (rank + 1) * self.size.streams // size]].T
        length, steps = self.size.length, self.steps(size)
        begin = epoch % self.size.parts * steps * length
        # Those that carry no state read their pieces in any order.
        places = range(steps) if self.carries else torch.randperm(steps, generator=generator).tolist()
        for place in places:
            at = begin + place * length
            yield own[at : at + length].contiguous(), own[at + 1 : at + 1 + length].contiguous()

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
        """Mean cross entropy of the next word."""
        given, following = batch
        scores, state = model(given, self._state)
        self._state = state
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())

    def evaluate(self, model: nn.Module, rank: int, size: int) -> dict[str, tuple[float, float]]:
        """The sum of the losses of this rank's part of the held-out words."""
        device = next(model.parameters()).device
        length = self.size.length
        # Pieces that do not depend on the number of ranks: nor does the result.
        pieces = streams(self._test.numpy(), PIECES)[rank::size]
        own = torch.from_numpy(pieces).T.contiguous().to(device)
        total = count = 0.0
        state = None
        if not len(pieces):
            return {"perplexity": (0.0, 0.0)}
        for at in range(0, len(own) - 1, length):
            following = own[at + 1 : at + 1 + length]
            scores, state = model(own[at : at + len(following)], state)
            total += float(F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum"))
            count += following.numel()
        return {"perplexity": (total, count)}


class LSTM(nn.Module):
    """Tied embeddings, two layers of LSTM, dropout around each (Zaremba et al. 2014)."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, size.layers, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, given: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Scores (t, b, vocabulary) of the words that follow ``given``, (t, b); and the state after them."""
        hidden, state = self.lstm(self.dropout(self.embedding(given)), state)
        return F.linear(self.dropout(hidden), self.embedding.weight), tuple(part.detach() for part in state)


class Language(WordsTraining):
    """See ``evidence.application.Application``."""

    name: ClassVar[str] = "language"
    title: ClassVar[str] = "Language model, LSTM"
    carries: ClassVar[bool] = True
    lr: ClassVar[float] = 0.5
    dropout: ClassVar[float] = 0.5
    clip: float | None = 1.0
    sizes: ClassVar[dict[Scale, Size]] = {
        "full": Size(1000, 96, 2, 16, 16, 50_000, 1, 40, 2, 22_000),
        "quick": Size(2000, 96, 2, 16, 32, 22_500, 1, 4, 1, 6000),
        "tiny": Size(500, 32, 2, 8, 8, 1100, 1, 4, 1, 600),
    }

    def facts(self) -> dict[str, str]:
        """What the page says."""
        size = self.size
        return {
            "data": self.text_facts(),
            "model": f"{size.layers} layers of {size.width} LSTM cells, tied embeddings, dropout {self.dropout:g}",
            "training": f"SGD with momentum 0.9 at a learning rate of {self.lr:g} that falls to 0 from three fifths of "
            f"the steps on, gradients clipped to a norm of {self.clip:g}, {size.streams} streams of {size.length} "
            f"words a step on all ranks together, {size.epochs} epochs",
        }

    def make_model(self) -> nn.Module:
        """A new network on the host."""
        return LSTM(self.size, self.dropout)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum SGD."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def rate(self, progress: float) -> float:
        """A short rise, and a straight fall from three fifths on."""
        return min(1.0, 0.1 + 20 * progress) * min(1.0, (1 - progress) / 0.4)
