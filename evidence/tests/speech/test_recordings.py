"""Recorded prompts, by files made here."""

from __future__ import annotations

import wave

import numpy as np
import pytest

from evidence.application import EvidenceError
from evidence.speech import corpus, recordings


def write(path, samples, rate=8000):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, "<i2").tobytes())


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A folder of two prompts that takes the package's place."""
    where = tmp_path / "prompts"
    tone = 8000 * np.sin(np.arange(6000) * 0.4)
    write(where / "digits" / "0.wav", tone)
    write(where / "vm-goodbye.wav", tone)
    write(where / "tt-monkeys.wav", tone)
    monkeypatch.setattr(recordings, "FOLDERS", (tmp_path / "nothing", where))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return where


def test_prompts_of_the_vocabulary_are_read(prompts):
    assert recordings.folder() == prompts
    assert [text for text, _ in recordings.recordings(prompts)] == ["zero", "goodbye"]
    samples = recordings.read(prompts / "digits" / "0.wav")
    assert samples.shape == (6000,)
    assert np.abs(samples).max() == pytest.approx(8000 / 32768, abs=1e-3)


def test_prompts_in_the_cache(prompts):
    corpus.prepare_recorded()
    kept = corpus.load_corpus(corpus.RECORDED)
    assert kept.spelled.tolist() == [4, 7]
    assert (kept.lengths % corpus.LENGTHS == 0).all()


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "FOLDERS", (tmp_path,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert recordings.folder() is None
    corpus.prepare_recorded()
    assert not (tmp_path / "cache").exists()


def test_what_is_no_prompt(prompts):
    write(prompts / "hello.wav", [0] * 100, rate=16000)
    with pytest.raises(EvidenceError, match=r"hello.wav has \(channels, bytes, rate\) \(1, 2, 16000\)"):
        recordings.recordings(prompts)
    (prompts / "hello.wav").write_bytes(b"RIFFhalf")
    with pytest.raises(EvidenceError, match=r"hello.wav cannot be read .*install asterisk-core-sounds-en-wav again"):
        recordings.recordings(prompts)
