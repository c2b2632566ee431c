"""Who says what, and how: the utterances to train and to test on, built once into the user's cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from evidence.data.cache import build_once, load
from evidence.speech.decoding import numbers_of
from evidence.speech.features import RATE, WIDTH, frame_count, frames, sample_count
from evidence.speech.recordings import folder, recordings
from evidence.speech.synthesiser import Synthesiser, Utterance
from evidence.speech.vocabulary import phrases

VERSION = 3
"""Of all that the arrays depend on beside the synthesiser: it goes up with each change."""
ACCENTS = "en-US en en-US-nyc en-GB-scotland en-GB-x-rp en-029 en-GB-x-gbclan en-GB-x-gbcwmd".split()
TRAINING = (
    "m1 f1 m2 f2 Mike anika m3 f3 Alex Andrea m4 f5 Gene Annie Denis grandma m6 Alicia m7 Hugo Marco Mario adam "
    "antonio edward max pablo paul pedro robert sandro victor"
).split()
HELD_OUT = "m8 f4 Michael linda benjamin steph norbert quincy".split()
"""Voices that nothing is trained on."""
SPEEDS, PITCHES = (130, 210), (30, 70)
"""Words a minute; a voice's own pitch is 50. Each utterance's are drawn from between."""
WARPS = (0.9, 1.12)
"""A voice to train on is played so much slower or faster, which makes a larger or smaller speaker of it: there are few
voices, and others are to be understood."""
PAIRS = 0.25
"""So many utterances have two phrases."""
SIGNAL_TO_NOISE = (15.0, 35.0)
"""Decibels; the recordings, which are clean, get the last."""
LOUDNESS = 0.1
"""Root of the mean square of an utterance before noise is added."""
AROUND = 0.1
"""Seconds: at most so much noise before an utterance, and at least half of it after."""
LENGTHS = 8
"""Utterances have a multiple of so many frames, so that many have the same length: batches need no padding."""


@dataclass(frozen=True)
class Part:
    """A set of utterances."""

    name: str
    voices: tuple[str, ...]
    accents: int
    """That each voice has: American, and others in turns."""
    each: int
    """Utterances of a voice in an accent."""
    seed: int
    warps: tuple[float, float] = (1.0, 1.0)
    """Each utterance's is drawn from between."""

    def file(self, synthesiser: Synthesiser) -> str:
        """Its name in the cache: with all that its content depends on."""
        size = f"{len(self.voices)}x{self.accents}x{self.each}"
        return f"speech-{VERSION}-{self.name}-{size}-{synthesiser.source.replace(' ', '-')}-{synthesiser.version}"


def train_part(voices: int, each: int) -> Part:
    """What to train on: the first ``voices`` of the voices."""
    return Part("train", tuple(TRAINING[:voices]), 2, each, 1, WARPS)


def test_part(voices: int, each: int) -> Part:
    """What to test on: the first ``voices`` of those held out."""
    return Part("test", tuple(HELD_OUT[:voices]), 2, each, 2)


@dataclass(frozen=True)
class Corpus:
    """Utterances, those of all one after the other."""

    frames: np.ndarray
    """float16 (all frames, WIDTH)."""
    lengths: np.ndarray
    """Frames of each utterance."""
    letters: np.ndarray
    """uint8: numbers of letters."""
    spelled: np.ndarray
    """Letters of each utterance."""

    def __len__(self) -> int:
        return len(self.lengths)


def prepare_spoken(part: Part, synthesiser: Synthesiser) -> None:
    """Build a set into the cache, unless it is there.

    Raises:
        EvidenceError: the synthesiser fails, or the cache cannot be written.
    """
    build_once(part.file(synthesiser), lambda: _arrays(spoken(part, synthesiser)))


def prepare_recorded() -> None:
    """Build the recordings into the cache, where they are installed and not there yet.

    Raises:
        EvidenceError: a recording is damaged, or the cache cannot be written.
    """
    where = folder()
    if where is not None:
        build_once(RECORDED, lambda: _arrays(recorded_utterances(recordings(where))))


RECORDED = f"speech-{VERSION}-recordings"


def load_corpus(file: str) -> Corpus:
    """A set of the cache.

    Raises:
        EvidenceError: it is not there, or damaged.
    """
    return Corpus(**load(file))


def spoken(part: Part, synthesiser: Synthesiser) -> list[tuple[str, np.ndarray]]:
    """Text and frames of each utterance of a set, in the order of its speakers.

    Raises:
        EvidenceError: the synthesiser fails.
    """
    speakers = [
        (voice, ACCENTS[0] if turn == 0 else ACCENTS[1 + (place * (part.accents - 1) + turn - 1) % (len(ACCENTS) - 1)])
        for place, voice in enumerate(part.voices)
        for turn in range(part.accents)
    ]

    def speaker(number: int) -> list[tuple[str, np.ndarray]]:
        voice, accent = speakers[number]
        random = np.random.default_rng([part.seed, number])
        utterances = _utterances(part.each, random)
        rate, sounds = synthesiser.speak(f"gmw/{accent}+{voice}", utterances)
        heard = (resampled(sound / 32768, RATE / rate * random.uniform(*part.warps)) for sound in sounds)
        return [
            (u.text, frames(in_noise(sound, random.uniform(*SIGNAL_TO_NOISE), random)))
            for u, sound in zip(utterances, heard, strict=True)
        ]

    # Each speaker has a process and random numbers of its own: how many work at a time changes nothing.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [pair for pairs in pool.map(speaker, range(len(speakers))) for pair in pairs]


def recorded_utterances(recorded: Sequence[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Text and frames of recordings."""
    random = np.random.default_rng(3)
    return [(text, frames(in_noise(samples, SIGNAL_TO_NOISE[1], random))) for text, samples in recorded]


def _utterances(count: int, random: np.random.Generator) -> list[Utterance]:
    """What a speaker says: no phrase twice before all were said once."""
    known = phrases()
    waiting: list[int] = []
    said = []
    for _ in range(count):
        words = []
        for _ in range(2 if random.random() < PAIRS else 1):
            waiting = waiting or random.permutation(len(known)).tolist()
            words.append(known[waiting.pop()])
        speed, pitch = int(random.integers(*SPEEDS)), int(random.integers(*PITCHES))
        said.append(Utterance(" ".join(words), speed, pitch))
    return said


def resampled(samples: np.ndarray, ratio: float) -> np.ndarray:
    """The same sound in ``ratio`` times as many samples, without the frequencies that these cannot have."""
    count = max(1, round(len(samples) * ratio))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(spectrum, count) * (count / len(samples))


def in_noise(samples: np.ndarray, decibels: float, random: np.random.Generator) -> np.ndarray:
    """An utterance somewhere in noise, which lasts for a multiple of :data:`LENGTHS` frames.

    Args:
        samples: of the utterance, :data:`RATE` a second.
        decibels: signal to noise.
        random: draws the noise, its colour (from white to 1/f) and the place.

    Returns:
        float64 samples.
    """
    samples = samples * (LOUDNESS / max(float(np.sqrt(np.mean(samples**2))), 1e-6))
    before = int(random.integers(0, int(AROUND * RATE)))
    needed = before + len(samples) + int(AROUND / 2 * RATE)
    count = -(-frame_count(needed) // LENGTHS) * LENGTHS
    total = max(sample_count(count), needed)
    spectrum = np.fft.rfft(random.standard_normal(total))
    spectrum *= np.maximum(np.fft.rfftfreq(total), 1 / 256) ** (-random.uniform(0, 0.5))
    noise = np.fft.irfft(spectrum, total)
    noise *= LOUDNESS * 10 ** (-decibels / 20) / np.sqrt(np.mean(noise**2))
    noise[before : before + len(samples)] += samples
    return noise[: sample_count(count)]


def _arrays(utterances: Sequence[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    letters = [numbers_of(text) for text, _ in utterances]
    return {
        "frames": np.concatenate([each for _, each in utterances]).reshape(-1, WIDTH),
        "lengths": np.array([len(each) for _, each in utterances], np.int32),
        "letters": np.concatenate(letters),
        "spelled": np.array([len(each) for each in letters], np.int32),
    }


def starts(counts: np.ndarray) -> np.ndarray:
    """Where each piece begins when pieces of these lengths lie one after the other."""
    return np.array([0, *accumulate(counts.tolist())][:-1], np.int64)
