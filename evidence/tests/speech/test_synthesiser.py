"""The synthesiser: the same list sounds the same, and what is missing is said in one sentence."""

from __future__ import annotations

import ctypes.util
import importlib.util

import numpy as np
import pytest

from evidence.application import EvidenceError
from evidence.applications import application_class
from evidence.speech import synthesiser
from evidence.speech.synthesiser import MISSING, Synthesiser, Utterance, find

SAID = [Utterance("seven", 160, 50), Utterance("thank you", 180, 40), Utterance("w", 140, 60)]
VOICE = "gmw/en-US+f2"


@pytest.fixture(scope="module")
def found():
    there = find()
    assert there is not None, MISSING
    return there


def test_the_same_list_sounds_the_same(found):
    rate, first = found.speak(VOICE, SAID)
    again_rate, again = found.speak(VOICE, SAID)
    assert rate == again_rate >= 16000
    assert len(first) == len(SAID)
    for once, twice in zip(first, again, strict=True):
        assert once.dtype == np.int16
        assert np.array_equal(once, twice)
        assert 0.1 * rate < len(once) < 3 * rate
        assert np.abs(once).max() > 1000


def test_voices_speeds_and_pitches_differ(found):
    texts = [Utterance("seven", 160, 50), Utterance("seven", 220, 50), Utterance("seven", 160, 90)]
    _, (usual, fast, high) = found.speak(VOICE, texts)
    _, (other, *_) = found.speak("gmw/en-GB-scotland+m3", texts)
    assert len(fast) < len(usual)
    for sound in (high, other):
        assert len(sound) != len(usual) or not np.array_equal(sound, usual)


def test_a_voice_that_is_not_there(found):
    with pytest.raises(EvidenceError, match=r"fails with the voice 'gmw/en-US\+nobody': it has no such voice"):
        found.speak("gmw/en-US+nobody", SAID)


def test_a_library_that_is_not_there():
    gone = Synthesiser("nowhere", "/nowhere/libespeak-ng.so", None, "0")
    with pytest.raises(EvidenceError, match=r"eSpeak NG 0 from nowhere fails .*cannot open shared object"):
        gone.speak(VOICE, SAID)


def test_without_a_synthesiser(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(synthesiser, "SYSTEM", "libnowhere.so.1")
    assert find() is None
    speech = application_class("speech")
    assert speech.missing() == MISSING
    assert "pip install espeakng-loader" in MISSING
    assert "apt install espeak-ng" in MISSING
    with pytest.raises(EvidenceError, match="needs the synthesiser"):
        speech.prepare("tiny")
    with pytest.raises(EvidenceError, match="needs the synthesiser"):
        speech("tiny", 0)
