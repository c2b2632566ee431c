"""Speech recognition: spoken words to letters, two bidirectional layers of LSTM with CTC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from evidence.application import EvidenceError, Metric, Scale
from evidence.speech.corpus import (
    RECORDED,
    Corpus,
    Part,
    load_corpus,
    prepare_recorded,
    prepare_spoken,
    starts,
    test_part,
    train_part,
)
from evidence.speech.decoding import BLANK, CLASSES, edits, greedy
from evidence.speech.features import BANDS, FRAME, RATE, STACK, WIDTH
from evidence.speech.recordings import PACKAGE, folder
from evidence.speech.synthesiser import MISSING, Synthesiser, find
from evidence.speech.vocabulary import phrases

ERRORS = "character error rate"
ON_RECORDINGS = f"{ERRORS}, recordings"
HIDDEN_BANDS, HIDDEN_FRAMES = 5, 1
"""The most that are hidden from the network in an utterance that it learns from."""


@dataclass(frozen=True)
class Size:
    """How large a training is."""

    train: Part
    test: Part
    width: int
    batch: int
    """Utterances a step, on all ranks together."""
    epochs: int
    rampup_epochs: int


class Recogniser(nn.Module):
    """Frames to scores of letters."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.below = nn.LSTM(WIDTH, width, bidirectional=True)
        self.above = nn.LSTM(2 * width, width, bidirectional=True)
        self.letters = nn.Linear(2 * width, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Scores (t, b, CLASSES) of frames (t, b, WIDTH)."""
        heard = self.dropout(self.below(frames)[0])
        return self.letters(self.dropout(self.above(heard)[0]))


class Utterances:
    """A corpus as tensors, some of it at a time."""

    def __init__(self, corpus: Corpus) -> None:
        self.lengths = corpus.lengths
        self._frames = torch.from_numpy(corpus.frames)
        self._letters = torch.from_numpy(corpus.letters)
        self._spelled = torch.from_numpy(corpus.spelled)
        self._lengths = torch.from_numpy(corpus.lengths)
        self._first_frame, self._first_letter = starts(corpus.lengths), starts(corpus.spelled)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def minutes(self) -> float:
        """How long they last together."""
        return float(self.lengths.sum()) * FRAME / RATE / 60

    def letters(self, number: int) -> torch.Tensor:
        """The letters of an utterance."""
        return self._letters.narrow(0, int(self._first_letter[number]), int(self._spelled[number]))

    def frames(self, numbers: np.ndarray) -> torch.Tensor:
        """float32 (t, b, WIDTH), where shorter ones end in zeros."""
        pieces = [self._frames.narrow(0, int(self._first_frame[n]), int(self.lengths[n])) for n in numbers]
        return nn.utils.rnn.pad_sequence(pieces).float()

    def batch(self, numbers: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Frames (t, b, WIDTH), their counts (b,), letters one after the other and their counts (b,)."""
        letters = torch.cat([self.letters(n) for n in numbers]).long()
        chosen = torch.from_numpy(numbers)
        return self.frames(numbers), self._lengths[chosen].long(), letters, self._spelled[chosen].long()


def hide(frames: torch.Tensor, random: np.random.Generator) -> None:
    """Put zeros in place of a range of bands and of a range of frames of each utterance (Park et al. 2019).

    Args:
        frames: (t, b, WIDTH); changed in place.
        random: draws the ranges.
    """
    count, utterances, _ = frames.shape
    bands = frames.view(count, utterances, STACK, BANDS)
    for number in range(utterances):
        width = int(random.integers(0, HIDDEN_BANDS + 1))
        first = int(random.integers(0, BANDS - width + 1))
        bands[:, number, :, first : first + width] = 0
        length = int(random.integers(0, HIDDEN_FRAMES + 1))
        begin = int(random.integers(0, count - length + 1))
        frames[begin : begin + length, number] = 0


class Speech:
    """See ``evidence.application.Application``."""

    name: ClassVar[str] = "speech"
    title: ClassVar[str] = "Speech recognition"
    framework: ClassVar[Literal["torch", "keras"]] = "torch"
    ranks: ClassVar[int] = 4
    lr: ClassVar[float] = 0.2
    dropout: ClassVar[float] = 0.2
    clip: float | None = 1.0
    sizes: ClassVar[dict[Scale, Size]] = {
        "full": Size(train_part(32, 60), test_part(8, 30), 128, 16, 60, 5),
        "quick": Size(train_part(8, 40), test_part(2, 20), 96, 32, 12, 2),
        "tiny": Size(train_part(1, 8), test_part(1, 4), 32, 8, 2, 1),
    }

    def __init__(self, scale: Scale, seed: int) -> None:
        """Load the utterances."""
        self.scale, self.seed = scale, seed
        self.size = self.sizes[scale]
        self.epochs, self.rampup_epochs = self.size.epochs, self.size.rampup_epochs
        self._synthesiser = _synthesiser()
        self._train = Utterances(load_corpus(self.size.train.file(self._synthesiser)))
        self._tests = {ERRORS: Utterances(load_corpus(self.size.test.file(self._synthesiser)))}
        if folder() is not None:
            self._tests[ON_RECORDINGS] = Utterances(load_corpus(RECORDED))
        self.metrics = tuple(Metric(name, "lower", percent=True) for name in self._tests)

    @classmethod
    def missing(cls) -> str | None:
        """How to install a synthesiser, where there is none."""
        return MISSING if find() is None else None

    @classmethod
    def prepare(cls, scale: Scale) -> None:
        """Let the synthesiser speak, and build what was heard into the cache."""
        synthesiser = _synthesiser()
        prepare_spoken(cls.sizes[scale].train, synthesiser)
        prepare_spoken(cls.sizes[scale].test, synthesiser)
        prepare_recorded()

    def facts(self) -> dict[str, str]:
        """What the page says."""
        size, train, test = self.size, self._train, self._tests[ERRORS]
        recorded = self._tests.get(ON_RECORDINGS)
        data = (
            f"{len(phrases())} words and short phrases, spoken by {self._synthesiser}: {len(train):,} utterances "
            f"({train.minutes:.0f} minutes) of {len(size.train.voices)} voices to train on, {len(test):,} "
            f"({test.minutes:.1f} minutes) of {len(size.test.voices)} other voices to test on, each voice in "
            f"{size.test.accents} accents, at many speeds and pitches, in noise; "
        )
        if recorded:
            data += f"and {len(recorded)} of Asterisk's recorded prompts, a human voice, which nothing is trained on"
        else:
            data += f"Asterisk's recorded prompts were not there (Debian's {PACKAGE})"
        return {
            "data": data,
            "model": f"2 bidirectional layers of {size.width} LSTM cells each way, log-mel features ({BANDS} bands, a "
            f"frame of {STACK} windows every 30 ms), CTC over {CLASSES - 1} letters, dropout {self.dropout:g}; the "
            "best path is read, without a dictionary",
            "training": f"SGD with momentum 0.9 at a learning rate of {self.lr:g} that falls to 0 as a cosine, "
            f"gradients clipped to a norm of {self.clip:g}, {size.batch} utterances a step on all ranks together, some "
            f"bands hidden in each, {size.epochs} epochs",
        }

    def steps(self, size: int) -> int:
        """Steps of an epoch."""
        return len(self._train) // self.size.batch

    def batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[Any, ...]]:
        """This rank's share of each step's utterances, which are about equally long; see :meth:`Utterances.batch`."""
        random = np.random.default_rng([self.seed, epoch])
        steps = self.steps(size)
        chosen = random.permutation(len(self._train))[: steps * self.size.batch]
        chosen = chosen[np.argsort(self._train.lengths[chosen], kind="stable")]
        for step in random.permutation(steps):
            together = chosen[step * self.size.batch : (step + 1) * self.size.batch]
            frames, *others = self._train.batch(together[rank::size])
            hide(frames, np.random.default_rng([self.seed, epoch, int(step), rank]))
            yield frames, *others

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
        """CTC (Graves et al. 2006), the mean over the letters of an utterance and over utterances."""
        frames, lengths, letters, spelled = batch
        scores = F.log_softmax(model(frames), dim=-1)
        return F.ctc_loss(scores, letters, lengths, spelled, blank=BLANK, zero_infinity=True)

    def evaluate(self, model: nn.Module, rank: int, size: int) -> dict[str, tuple[float, float]]:
        """The edits of this rank's part of the held-out utterances, and their letters."""
        return {name: self._edits(model, test, rank, size) for name, test in self._tests.items()}

    def _edits(self, model: nn.Module, test: Utterances, rank: int, size: int) -> tuple[float, float]:
        device = next(model.parameters()).device
        wrong = count = 0
        own = np.arange(rank, len(test), size)
        # One length at a time: without padding, the result does not depend on what is heard together.
        for length in np.unique(test.lengths[own]):
            numbers = own[test.lengths[own] == length]
            best = model(test.frames(numbers).to(device)).argmax(dim=-1).cpu().numpy()
            for place, number in enumerate(numbers):
                letters = test.letters(number).numpy()
                wrong += edits(greedy(best[:, place]), letters)
                count += len(letters)
        return float(wrong), float(count)

    def make_model(self) -> nn.Module:
        """A new network on the host."""
        return Recogniser(self.size.width, self.dropout)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum SGD."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def rate(self, progress: float) -> float:
        """A short rise, then a cosine."""
        return min(1.0, 0.1 + 20 * progress) * 0.5 * (1 + math.cos(math.pi * progress))


def _synthesiser() -> Synthesiser:
    found = find()
    if found is None:
        raise EvidenceError(MISSING)
    return found


class ShortSpeech(Speech):
    """The same in a quarter of the steps: larger batches, half the epochs."""

    name: ClassVar[str] = "speech_short"
    title: ClassVar[str] = "Speech recognition, few steps"
    sizes: ClassVar[dict[Scale, Size]] = {
        **Speech.sizes,
        "full": Size(train_part(32, 60), test_part(8, 30), 128, 32, 30, 5),
    }
