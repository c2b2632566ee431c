"""A process that speaks: eSpeak NG's library through ctypes, one voice, one list of utterances.

    python -m evidence.speech.speaking < request.json > samples

The library carries state (noise, vibrato) from each utterance to the next, so the same sound twice takes a fresh
process that speaks the same list. The standard library suffices here, and such a process starts in a moment.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

SYNCHRONOUS = 2
"""espeak_AUDIO_OUTPUT: samples go to the callback, within the call that asks for them."""
DO_NOT_EXIT = 0x8000
"""espeakINITIALIZE_DONT_EXIT: an error is returned."""
RATE, PITCH = 1, 3
"""espeak_PARAMETER."""
CHARACTERS, UTF8 = 1, 1
"""espeak_POSITION_TYPE and espeakCHARS_UTF8."""
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class SpeakingError(Exception):
    """What the library refused."""


def version(library: str) -> str:
    """What the library calls itself: "1.52.0".

    Raises:
        OSError: it cannot be loaded.
    """
    return _information(ctypes.CDLL(library))[0]


def _information(library: ctypes.CDLL) -> tuple[str, Path]:
    """Version, and the folder of the voices, which is known when the library is initialised."""
    library.espeak_Info.restype = ctypes.c_char_p
    folder = ctypes.c_char_p()
    text: bytes = library.espeak_Info(ctypes.byref(folder))
    return text.decode().split()[0], Path((folder.value or b"").decode())


def speak(request: dict[str, Any], out: BinaryIO) -> None:
    """Write what was asked for: the sample rate (uint32), then of each utterance its length (uint32) and int16 samples.

    Args:
        request: "path": of the library; "data": the folder of its voices, or None for its own; "voice": "gmw/en-US+m1";
            "utterances": (text, words a minute, pitch from 0 to 99) of each.
        out: where to.

    Raises:
        SpeakingError: there is no such voice, or the library fails.
        OSError: it cannot be loaded.
    """
    library = ctypes.CDLL(request["path"])
    data = request["data"].encode() if request["data"] else None
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, data, DO_NOT_EXIT)
    if rate <= 0:
        raise SpeakingError("it cannot be initialised: its voices' data are missing")
    # A variant that it does not have is passed over without a word.
    variant = _information(library)[1] / "voices" / "!v" / request["voice"].partition("+")[2]
    if library.espeak_SetVoiceByName(request["voice"].encode()) != 0 or not variant.exists():
        raise SpeakingError("it has no such voice")
    if hasattr(library, "espeak_ng_SetRandSeed"):  # From 1.52 on, which begins with the clock; before, always the same.
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))
    pieces: list[bytes] = []

    def keep(samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = CALLBACK(keep)  # It must live as long as the library may call it.
    library.espeak_SetSynthCallback(callback)
    out.write(struct.pack("<I", rate))
    for text, speed, pitch in request["utterances"]:
        pieces.clear()
        library.espeak_SetParameter(RATE, speed, 0)
        library.espeak_SetParameter(PITCH, pitch, 0)
        spoken = text.encode()
        if library.espeak_Synth(spoken, len(spoken) + 1, 0, CHARACTERS, 0, UTF8, None, None) != 0:
            raise SpeakingError(f"it does not speak {text!r}")
        sound = b"".join(pieces)
        out.write(struct.pack("<I", len(sound) // 2) + sound)
    out.flush()


def main() -> int:
    """Read the request from stdin; returns the exit status, and says in one line of stderr what went wrong."""
    try:
        speak(json.load(sys.stdin), sys.stdout.buffer)
    except (SpeakingError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
