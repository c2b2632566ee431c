"""Shared by the tests of the device kernels on a fake device and on a GPU: buckets of work, and the comparison."""

import numpy as np

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds

ALIGNMENT = 16


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum([-(-n // ALIGNMENT) * ALIGNMENT for n in lengths])]).astype(np.int64)


class Bucket:
    """A bucket's state twice: on the device (through ``to_device`` and ``to_host``) and for the reference."""

    def __init__(self, lengths, kernels, to_device=np.array, to_host=np.array):
        self.lengths, self.offsets = lengths, offsets_of(lengths)
        n = int(self.offsets[-1])
        self.kernels, self.reference = kernels, ReferenceKernels()
        self.to_device, self.to_host = to_device, to_host
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.device_u, self.device_v = to_device(self.u), to_device(self.v)
        self.thresholds = new_thresholds(len(lengths))

    def work(self, gradients, parameters, options):
        """The same work for the device and for the reference."""
        mine, theirs = [], []
        for i, length in enumerate(self.lengths):
            o = options[i] if isinstance(options, list) else options
            g, p = gradients[i], None if parameters is None else parameters[i]
            common = dict(offset=int(self.offsets[i]), length=length, **o)
            mine.append(SegmentWork(self.to_device(g), None if p is None else self.to_device(p), **common))
            theirs.append(SegmentWork(g, p, **common))
        return mine, theirs

    def assert_same_state(self):
        same_bits(self.to_host(self.device_u), self.u)
        same_bits(self.to_host(self.device_v), self.v)


def same_bits(a, b):
    """Equal bit for bit, except that one NaN is as good as another."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    kind = f"u{a.dtype.itemsize}"
    different = (a.view(kind) != b.view(kind)) & ~(np.isnan(a) & np.isnan(b))
    assert not different.any(), (np.flatnonzero(different)[:5], a[different][:5], b[different][:5])


def assert_same_selection(got, wanted):
    np.testing.assert_array_equal(got.positions, wanted.positions)
    assert got.positions.dtype == np.int64
    same_bits(got.values, wanted.values)
