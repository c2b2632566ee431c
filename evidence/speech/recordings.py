"""Recorded prompts of the telephone exchange Asterisk, where Debian's package of them is installed."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from evidence.application import EvidenceError
from evidence.speech.features import RATE
from evidence.speech.vocabulary import recorded

PACKAGE = "asterisk-core-sounds-en-wav"
FOLDERS = tuple(Path(base) for base in ("/usr/share/asterisk/sounds/en_US_f_Allison", "/var/lib/asterisk/sounds/en"))
"""Where Debian's package, and Asterisk's own archives, put them."""


def folder() -> Path | None:
    """The folder of the recordings; None: there are none."""
    return next((path for path in FOLDERS if (path / "digits" / "0.wav").is_file()), None)


def read(path: Path) -> np.ndarray:
    """A recording's samples within [-1, 1], float64.

    Raises:
        EvidenceError: it is none of a telephone's (mono, 16 bit, 8000 a second), or damaged.
    """
    try:
        with wave.open(str(path)) as file:
            kind = file.getnchannels(), file.getsampwidth(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise EvidenceError(f"the recording {path} cannot be read ({error}); install {PACKAGE} again") from error
    if kind != (1, 2, RATE):
        raise EvidenceError(f"the recording {path} has (channels, bytes, rate) {kind}, not {(1, 2, RATE)}")
    return np.frombuffer(content, "<i2") / 32768


def recordings(where: Path) -> list[tuple[str, np.ndarray]]:
    """What is said in each recording of the vocabulary, and its samples; files that a release lacks are left out.

    Args:
        where: what :func:`folder` found.
    """
    paths = ((where / f"{name}.wav", text) for name, text in sorted(recorded().items()))
    return [(text, read(path)) for path, text in paths if path.is_file()]
