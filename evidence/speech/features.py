"""From samples to what a network hears: the logarithms of energies in bands that are as wide as the ear's."""

from __future__ import annotations

from functools import cache

import numpy as np

RATE = 8000
"""Samples a second: a telephone's, as of the recordings."""
WINDOW, HOP, FFT = 200, 80, 256
"""Samples: a window of 25 ms every 10 ms."""
BANDS = 32
STACK = 3
"""Windows that make one frame of 30 ms, so that the network takes a third of the steps."""
WIDTH = BANDS * STACK
FRAME = HOP * STACK
"""Samples from one frame to the next."""


def mel(hertz: np.ndarray) -> np.ndarray:
    """Stevens' pitch scale, as O'Shaughnessy wrote it down."""
    return 2595 * np.log10(1 + hertz / 700)


@cache
def filters() -> np.ndarray:
    """(BANDS, FFT // 2 + 1): triangles whose corners lie equally far apart in mel, from 0 Hz to half the rate."""
    top = mel(np.array(RATE / 2))
    corners = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    hertz = np.arange(FFT // 2 + 1) * RATE / FFT
    left, middle, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    return np.maximum(0, np.minimum((hertz - left) / (middle - left), (right - hertz) / (right - middle)))


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Logarithms of the energies in each band.

    Args:
        samples: at :data:`RATE` a second, within [-1, 1]; at least one window.

    Returns:
        float64 (1 + (n - WINDOW) // HOP, BANDS).
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP] * np.hanning(WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(windows, FFT)) ** 2
    return np.log(power @ filters().T + 1e-8)


def frames(samples: np.ndarray) -> np.ndarray:
    """What the network gets of an utterance.

    Each band has mean 0 and, over all bands, variance 1 within the utterance: neither loudness nor a microphone's
    colour matters.

    Args:
        samples: as of :func:`log_mel`, ``frame_count`` of which are used.

    Returns:
        float16 (frame_count(len(samples)), WIDTH).
    """
    energies = log_mel(samples)
    energies -= energies.mean(axis=0)
    energies /= energies.std() + 1e-5
    count = frame_count(len(samples))
    return energies[: count * STACK].reshape(count, WIDTH).astype(np.float16)


def frame_count(samples: int) -> int:
    """How many frames so many samples have."""
    return (1 + (samples - WINDOW) // HOP) // STACK


def sample_count(count: int) -> int:
    """The fewest samples that have so many frames."""
    return (count * STACK - 1) * HOP + WINDOW
