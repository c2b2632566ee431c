"""Passes and masks that other threads begin with give what they give one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dgc.core.kernels import sweep
from dgc.core.kernels.base import MomentumRule, SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError

SEGMENTS = (200_000, 131_072, 70_000, 3)
K = 400


class Buckets:
    """Four buckets of one rank, with gradients that depend on the step alone."""

    def __init__(self, kernels):
        self.kernels = kernels
        size = sum(SEGMENTS)
        self.states = [(np.zeros(size, np.float32), np.zeros(size, np.float32)) for _ in range(4)]
        self.thresholds = [kernels.new_thresholds(len(SEGMENTS)) for _ in self.states]
        self.sent = []

    def work(self, step, bucket):
        rng = np.random.default_rng((step, bucket))
        offsets = np.cumsum((0, *SEGMENTS))
        gradients = [rng.standard_normal(n, dtype=np.float32) for n in SEGMENTS]
        return [
            SegmentWork(g, None, int(offset), g.size, min(K, g.size), 0.9)
            for g, offset in zip(gradients, offsets[:-1], strict=True)
        ]

    def in_turn(self, step):
        for b, (u, v) in enumerate(self.states):
            chosen = self.kernels.accumulate_and_select(self.work(step, b), u, v, self.thresholds[b])
            self.kernels.mask(u, v, chosen.positions, np.float32(0.5) * chosen.values, masking=True)
            self.sent.append((chosen.positions, chosen.values))

    def overlapping(self, step):
        def begin(b):
            return self.kernels.begin_selection(self.work(step, b), *self.states[b], self.thresholds[b])

        last = len(self.states) - 1
        under_way = begin(0)
        for b, (u, v) in enumerate(self.states):
            following = begin(b + 1) if b < last else None
            chosen = under_way()
            under_way = following
            half = np.float32(0.5) * chosen.values
            self.kernels.mask(u, v, chosen.positions, half, masking=True)
            self.sent.append((chosen.positions, chosen.values))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_overlapping_buckets_equal_buckets_in_turn(threads):
    wanted, got = Buckets(NumbaKernels(1)), Buckets(NumbaKernels(threads))
    assert got.kernels.overlaps == (threads > 1)
    for step in range(8):
        wanted.in_turn(step)
        got.overlapping(step)
        for a, b in zip(wanted.states, got.states, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(wanted.sent, got.sent, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])


def test_the_reference_begins_when_asked_for_the_result():
    wanted, got = Buckets(ReferenceKernels()), Buckets(ReferenceKernels())
    got.kernels.begin_selection(got.work(0, 0), *got.states[0], got.thresholds[0])
    assert not np.any(got.states)
    wanted.in_turn(0)
    got.overlapping(0)
    assert not got.kernels.overlaps
    np.testing.assert_array_equal(wanted.states, got.states)


def test_a_pass_may_be_finished_by_another_thread():
    buckets = Buckets(NumbaKernels(2))
    finish = buckets.kernels.begin_selection(buckets.work(0, 0), *buckets.states[0], buckets.thresholds[0])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(finish).result().positions.size


def test_overlapping_passes_keep_their_scratch_arrays(monkeypatch):
    made = []

    class Counted(sweep.Scratch):
        def __init__(self, *sizes):
            made.append(sizes)
            super().__init__(*sizes)

    monkeypatch.setattr(sweep, "Scratch", Counted)
    buckets = Buckets(NumbaKernels(2))
    for step in range(3):
        buckets.overlapping(step)
    grown = len(made)
    for step in range(3, 6):
        buckets.overlapping(step)
    assert 2 <= grown == len(made)


def test_results_that_cannot_be_written_are_refused():
    kernels, one = NumbaKernels(1), np.ones(1, np.float32)
    with pytest.raises(LayoutError, match="no result"):
        kernels.scatter_add([], np.array([0]), np.array([3]), one, 1.0)
    result = np.zeros(4, np.float32)
    result.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        kernels.scatter_add([result], np.array([0, 4]), np.array([3]), one, 1.0)
    half = np.zeros(4, np.float16)
    with pytest.raises(LayoutError, match="float16"):
        kernels.dense_update(half, half, half, None, MomentumRule(momentum=0.9))
