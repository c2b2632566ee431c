"""Small changes to images, in NumPy: the same for every framework."""

from __future__ import annotations

import numpy as np

FRAME = 2
"""Pixels by which an image may move."""


def shifted(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Move each image by up to :data:`FRAME` pixels in both directions, and erase a square of 6x6 in half of them.

    Args:
        images: (n, height, width) float32, 0 being the background.
        random: draws where to.

    Returns:
        A new array of the same shape.
    """
    n, height, width = images.shape
    padded = np.pad(images, ((0, 0), (FRAME, FRAME), (FRAME, FRAME)))
    top, left = random.integers(0, 2 * FRAME + 1, (2, n))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    moved = padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
    corner = random.integers(0, min(height, width) - 6, (n, 2))
    for image in np.flatnonzero(random.random(n) < 0.5):
        row, column = corner[image]
        moved[image, row : row + 6, column : column + 6] = 0
    return moved
