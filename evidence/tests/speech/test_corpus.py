"""The utterances: repeatable, with held-out voices, in a cache that an interrupted build leaves as it was."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from evidence.data.cache import cache_folder, load
from evidence.speech.corpus import (
    HELD_OUT,
    LENGTHS,
    TRAINING,
    Part,
    load_corpus,
    prepare_spoken,
    spoken,
    starts,
    test_part,
    train_part,
)
from evidence.speech.decoding import text_of
from evidence.speech.features import WIDTH
from evidence.speech.synthesiser import MISSING, find

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


def test_voices_are_held_out():
    assert set(TRAINING).isdisjoint(HELD_OUT)
    assert set(train_part(99, 1).voices) == set(TRAINING)
    assert test_part(99, 1).warps == (1.0, 1.0)
