"""Scratch arrays of the CPU backend's pass over a bucket, kept from call to call."""

from __future__ import annotations

import threading

import numpy as np

from dgc.core.kernels.pick import BINS
from dgc.core.kernels.sweep import STRIP


class Scratch:
    """Scratch arrays of the pass over a bucket, of at least the sizes asked for."""

    def __init__(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> None:
        self.sizes = (workers, segments, chunks, workers * room)
        self.chunks = np.empty((3, chunks), np.int64)
        self.left = np.empty(segments, np.int64)
        self.spent = np.empty((workers, segments), np.int64)
        self.positions = np.empty(workers * room, np.int32)
        self.values = np.empty(workers * room, kind)
        self.wide = np.empty((workers, 2 * STRIP), kind)
        self.bins = np.empty((workers, BINS), np.int64)
        self.likes = np.empty((workers, 1), kind)


class Workspace(threading.local):
    """What a Python thread keeps from call to call: it grows, and stays."""

    def __init__(self) -> None:
        self._scratch: dict[np.dtype, list[Scratch]] = {}

    def borrow(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> Scratch:
        """Return scratch arrays for buckets of type ``kind`` that nobody else has, grown when they are too small."""
        kept = self._scratch.setdefault(kind, [])
        if kept:
            scratch = kept.pop()
            w, s, c, r = scratch.sizes
            if workers <= w and segments <= s and chunks <= c and workers * room <= r:
                return scratch
            workers, segments, chunks = max(workers, w), max(segments, s), max(chunks, c)
            room = max(room, -(-r // workers))
        return Scratch(kind, workers, segments, chunks, room)

    def give_back(self, kind: np.dtype, scratch: Scratch) -> None:
        """Keep scratch arrays for the next call."""
        self._scratch.setdefault(kind, []).append(scratch)
