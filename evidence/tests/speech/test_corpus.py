"""The utterances: repeatable, with held-out voices, in a cache that an interrupted build leaves as it was."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from evidence.data.cache import cache_folder, load
from evidence.speech import corpus
from evidence.speech.corpus import (
    HELD_OUT,
    LENGTHS,
    LOUDNESS,
    TRAINING,
    Part,
    in_noise,
    load_corpus,
    prepare_spoken,
    resampled,
    spoken,
    starts,
    test_part,
    train_part,
)
from evidence.speech.decoding import text_of
from evidence.speech.features import RATE, WIDTH, frame_count
from evidence.speech.synthesiser import MISSING, find
from evidence.speech.vocabulary import phrases

test_part.__test__ = False  # The name is no test's.
REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = Part("small", ("m1", "f4"), 2, 3, 7, (0.9, 1.1))


@pytest.fixture(scope="module")
def found():
    there = find()
    assert there is not None, MISSING
    return there


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_same_set_twice(found):
    first, again = spoken(SMALL, found), spoken(SMALL, found)
    assert len(first) == 12
    for (text, frames), (same_text, same_frames) in zip(first, again, strict=True):
        assert text == same_text
        assert np.array_equal(frames, same_frames)
        assert frames.dtype == np.float16
        assert len(frames) % LENGTHS == 0
        assert frames.shape[1] == WIDTH
    assert len({text for text, _ in first}) > 8


def test_a_larger_set_begins_like_a_smaller_one(found):
    """Speakers have random numbers and processes of their own."""
    alone = spoken(Part("small", ("m1",), 2, 3, 7, (0.9, 1.1)), found)
    for (text, frames), (same_text, same_frames) in zip(alone, spoken(SMALL, found), strict=False):
        assert text == same_text
        assert np.array_equal(frames, same_frames)


def test_the_cache_holds_what_was_said(found):
    said = spoken(SMALL, found)
    prepare_spoken(SMALL, found)
    kept = load_corpus(SMALL.file(found))
    assert len(kept) == len(said)
    for first, count, letter, letters, (text, frames) in zip(
        starts(kept.lengths), kept.lengths, starts(kept.spelled), kept.spelled, said, strict=True
    ):
        assert np.array_equal(kept.frames[first : first + count], frames)
        assert text_of(kept.letters[letter : letter + letters]) == text
        # CTC needs a frame for each letter and a blank between equal ones.
        assert count >= letters + sum(a == b for a, b in pairwise(text))


def test_what_the_sets_depend_on_is_in_their_names(found):
    names = {part.file(found) for part in (train_part(2, 3), train_part(2, 4), train_part(3, 3), test_part(2, 3))}
    assert len(names) == 4
    assert all(found.version in name and found.source.replace(" ", "-") in name for name in names)


def test_an_interrupted_build_leaves_nothing(found):
    """Killed where the arrays are written, as by a full disk or a power cut; the next call builds them."""
    script = (
        "import os, numpy as np\n"
        "from evidence.speech import corpus\n"
        "from evidence.speech.synthesiser import find\n"
        "def die(file, **arrays):\n"
        "    file.write(b'half')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
        "np.savez = die\n"
        "corpus.prepare_spoken(corpus.Part('small', ('m1',), 1, 1, 7), find())\n"
    )
    part = Part("small", ("m1",), 1, 1, 7)
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()
    assert list(cache_folder().glob("*.npz")) == []
    prepare_spoken(part, found)
    assert len(load(part.file(found))["lengths"]) == 1


def test_nothing_is_built_twice(found, monkeypatch):
    prepare_spoken(SMALL, found)
    monkeypatch.setattr(corpus, "spoken", lambda *_: pytest.fail("built again"))
    prepare_spoken(SMALL, found)


def test_voices_are_held_out():
    assert set(TRAINING).isdisjoint(HELD_OUT)
    assert set(train_part(99, 1).voices) == set(TRAINING)
    assert test_part(99, 1).warps == (1.0, 1.0)


def test_a_voice_says_everything_before_it_repeats_itself():
    said = corpus._utterances(120, np.random.default_rng(1))
    counts = {phrase: 0 for phrase in phrases()}
    for utterance in said:
        for phrase in _phrases_of(utterance.text):
            counts[phrase] += 1
    assert max(counts.values()) <= 2
    assert {corpus.SPEEDS[0] <= u.speed < corpus.SPEEDS[1] for u in said} == {True}


def _phrases_of(text):
    if text in phrases():
        return [text]
    words = text.split()
    cuts = ((" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(1, len(words)))
    return next([a, b] for a, b in cuts if a in phrases() and b in phrases())


def test_noise_is_as_loud_as_asked_for():
    random = np.random.default_rng(3)
    tone = np.sin(np.arange(8000) * 0.3)
    loud, quiet = (in_noise(tone, decibels, random) for decibels in (6.0, 60.0))
    assert len(loud) % (LENGTHS * 240) == 120  # The last frame's windows overlap what would be the next.
    assert frame_count(len(loud)) % LENGTHS == 0
    assert np.sqrt(np.mean(loud**2)) == pytest.approx(LOUDNESS * np.sqrt(1 + 0.25), rel=0.15)
    assert np.sqrt(np.mean(quiet**2)) == pytest.approx(LOUDNESS, rel=0.15)


def test_resampling_keeps_a_tone_and_drops_what_is_too_high():
    time = np.arange(22050) / 22050
    low, high = np.sin(2 * np.pi * 1000 * time), np.sin(2 * np.pi * 9000 * time)
    found = resampled(low + high, RATE / 22050)
    assert np.allclose(found, np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000), atol=1e-6)
    assert len(resampled(low, 1.1)) == round(22050 * 1.1)
