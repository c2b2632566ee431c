"""The speech synthesiser: eSpeak NG, from PyPI's ``espeakng-loader`` or from the system."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evidence.application import EvidenceError
from evidence.speech.speaking import version

REPOSITORY = Path(__file__).resolve().parents[2]
MISSING = (
    "speech needs the synthesiser eSpeak NG: pip install espeakng-loader (no root needed), or apt install espeak-ng"
)
PACKAGE = "espeakng-loader"
SYSTEM = "libespeak-ng.so.1"
SECONDS = 600
"""For one voice's list, which takes seconds."""


@dataclass(frozen=True)
class Utterance:
    """What one voice says once."""

    text: str
    speed: int
    """Words a minute, from 80 on; 175 is usual."""
    pitch: int
    """From 0 to 99; 50 is the voice's own."""


@dataclass(frozen=True)
class Synthesiser:
    """The library that was found."""

    source: str
    """Where from: "espeakng-loader", "the system"."""
    path: str
    """Of the shared object, or a name by which the loader finds it."""
    data: str | None
    """The folder of its voices; None: it knows."""
    version: str

    def __str__(self) -> str:
        return f"eSpeak NG {self.version} from {self.source}"

    def speak(self, voice: str, utterances: list[Utterance]) -> tuple[int, list[np.ndarray]]:
        """Let one voice speak, in a process of its own: the same list sounds the same, bit for bit.

        Args:
            voice: an accent and a variant: "gmw/en-US+f2".
            utterances: what it says, in this order.

        Returns:
            Samples a second, and the int16 samples of each utterance.

        Raises:
            EvidenceError: the synthesiser fails; the message says of what.
        """
        request = {
            "path": self.path,
            "data": self.data,
            "voice": voice,
            "utterances": [(u.text, u.speed, u.pitch) for u in utterances],
        }
        command = [sys.executable, "-m", "evidence.speech.speaking"]
        try:
            done = subprocess.run(
                command, input=json.dumps(request).encode(), capture_output=True, timeout=SECONDS, cwd=REPOSITORY
            )
        except subprocess.TimeoutExpired:
            raise EvidenceError(f"{self} did not finish with the voice {voice!r} in {SECONDS} seconds") from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip() or f"it ended with status {done.returncode}"
            raise EvidenceError(
                f"{self} fails with the voice {voice!r}: {said}; perhaps another release does: {MISSING}"
            )
        return _parse(done.stdout)


def find() -> Synthesiser | None:
    """The synthesiser of this machine; None: it has none.

    The package comes first: its version stands in ``constraints.txt``, so that one machine's sounds are another's.
    """
    for source, library, data in (_packaged(), _installed()):
        if library is not None:
            try:
                return Synthesiser(source, library, data, version(library))
            except OSError:  # There, but not for this machine: the next one, if any.
                continue
    return None


def _packaged() -> tuple[str, str | None, str | None]:
    if importlib.util.find_spec("espeakng_loader") is None:
        return PACKAGE, None, None
    import espeakng_loader

    return PACKAGE, espeakng_loader.get_library_path(), espeakng_loader.get_data_path()


def _installed() -> tuple[str, str | None, str | None]:
    return "the system", ctypes.util.find_library("espeak-ng") or SYSTEM, None


def _parse(content: bytes) -> tuple[int, list[np.ndarray]]:
    numbers = np.frombuffer(content, np.uint8)

    def whole(at: int) -> int:
        return int(numbers[at : at + 4].view("<u4")[0])

    rate, at, sounds = whole(0), 4, []
    while at < len(numbers):
        end = at + 4 + 2 * whole(at)
        sounds.append(numbers[at + 4 : end].view("<i2"))
        at = end
    return rate, sounds
