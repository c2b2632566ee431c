"""The synthesiser: what is missing is said in one sentence."""

from __future__ import annotations

import ctypes.util
import importlib.util

import pytest

from evidence.application import EvidenceError
from evidence.applications import application_class
from evidence.speech import synthesiser
from evidence.speech.synthesiser import MISSING, find


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
