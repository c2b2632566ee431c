"""Log-mel features against a straightforward reckoning."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest

from evidence.speech.features import (
    BANDS,
    FFT,
    FRAME,
    HOP,
    RATE,
    STACK,
    WIDTH,
    WINDOW,
    filters,
    frame_count,
    frames,
    log_mel,
    sample_count,
)


def tone(hertz, seconds=0.2):
    return 0.1 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)


def corner(number):
    """Hertz of the corners between bands, equally far apart in mel."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    return 700 * (10 ** (top * number / (BANDS + 1) / 2595) - 1)


def energy(window, band):
    """Of one band in one window, by the sums of the definition."""
    total = 0.0
    for line in range(FFT // 2 + 1):
        hertz = line * RATE / FFT
        left, middle, right = corner(band), corner(band + 1), corner(band + 2)
        weight = max(0.0, min((hertz - left) / (middle - left), (right - hertz) / (right - middle)))
        if weight:
            hann = (0.5 - 0.5 * math.cos(2 * math.pi * n / WINDOW) for n in range(WINDOW))
            line_sum = sum(
                x * h * cmath.exp(-2j * math.pi * line * n / FFT)
                for n, (x, h) in enumerate(zip(window, hann, strict=True))
            )
            total += weight * abs(line_sum) ** 2
    return total


def test_energies_are_those_of_the_definition():
    samples = np.random.default_rng(1).standard_normal(WINDOW + 2 * HOP) * 0.1
    found = log_mel(samples)
    assert found.shape == (3, BANDS)
    for window, band in [(0, 0), (1, 9), (2, BANDS - 1)]:
        wanted = math.log(energy(samples[window * HOP : window * HOP + WINDOW], band) + 1e-8)
        assert found[window, band] == pytest.approx(wanted, rel=1e-9)


def test_every_band_hears_something():
    assert (filters().sum(axis=1) > 0).all()


@pytest.mark.parametrize("band", [3, 15, 28])
def test_a_tone_is_loudest_in_its_band(band):
    assert set(log_mel(tone(corner(band + 1))).argmax(axis=1)) == {band}


def test_frames_are_normalised_and_stacked():
    samples = np.random.default_rng(2).standard_normal(4000)
    found = frames(samples).astype(np.float64)
    assert found.shape == (frame_count(4000), WIDTH)
    energies = log_mel(samples)
    energies = (energies - energies.mean(axis=0)) / (energies - energies.mean(axis=0)).std()
    assert np.allclose(found[2], energies[2 * STACK : 3 * STACK].ravel(), atol=2e-3)
    # Neither loudness nor a constant colour of the sound matters.
    assert np.allclose(frames(5 * samples), found, atol=5e-3)


def test_silence_has_finite_frames():
    assert np.isfinite(frames(np.zeros(2000))).all()


@pytest.mark.parametrize("count", [1, 8, 33])
def test_samples_of_frames(count):
    assert frame_count(sample_count(count)) == count
    assert frame_count(sample_count(count) - 1) == count - 1
    assert sample_count(count + 1) - sample_count(count) == FRAME
