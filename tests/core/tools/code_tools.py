"""Shared by the tests of codes on a processor and on a GPU: a bucket's message by kernels and by the host's loops."""

from types import SimpleNamespace

import numpy as np
from contract_tools import Alone, Case
from device_tools import same_bits

from dgc.core import loops
from dgc.core.compressors import StepInfo
from dgc.core.compressors.quantizers import tiles_of
from dgc.core.exchange.encoders.device.codes import DeviceCodesEncoder
from dgc.core.layout import Parameter, make_layout

# More than a tile, pieces of rows that are not full, a kernel of a convolution, a vector, one element.
SHAPES = {"a": (150, 90), "b": (6, 5, 3, 3), "c": (700,), "d": (7, 5), "e": (1,)}
CASES = [
    Case("onebit"), Case("onebit", {"means": "row"}), Case("onebit", {"means": "tensor"}),
    Case("qsgd"), Case("qsgd", {"bits": 2, "norm": "max", "bucket_size": 100}),
    Case("qsgd", {"bits": 8, "bucket_size": 3}),
    Case("terngrad"), Case("terngrad", {"clip_factor": None}),
    Case("dorefa"), Case("dorefa", {"bits": 1}), Case("dorefa", {"bits": 3}), Case("dorefa", {"bits": 5}),
]  # fmt: skip


class CodedBucket:
    """One bucket for the host, and what the kernels need to know of it."""

    def __init__(self, case, kernels, dtype="float32", shapes=None):
        self.alone, self.kernels = Alone(case, shapes or SHAPES, dtype), kernels
        layout = make_layout(
            [Parameter(n, s, dtype) for n, s in (shapes or SHAPES).items()], self.alone.algorithm.config
        )
        alone = SimpleNamespace(rank=0, size=1)
        self.encoder = DeviceCodesEncoder(self.alone.bucket, self.alone.algorithm, kernels, alone, layout)
        self.parts, self.algorithm = self.encoder._parts, self.alone.algorithm

    def write(self, v, x, payload):
        """Write ``payload`` from the device array v; x holds the same. Returns what the host writes, and its count."""
        wanted, count, used = self.alone.encode(x, step=3)
        info = StepInfo(3, 0, self.alone.seed, self.alone.thresholds)
        if self.algorithm.shares:
            info.shared = self.algorithm.prepare(x, self.alone.spec)
        state = SimpleNamespace(v=v)
        self.encoder._own = payload
        assert self.encoder._encode(state, self.alone.spec, info) == (count, used)
        return wanted[:used], count


def check_codes(case, kernels, dtype, x_of, to_device, to_host):
    """Moments, message and sums of a bucket equal the host's bit for bit."""
    bucket = CodedBucket(case, kernels, dtype)
    x = x_of(bucket.alone)
    v = to_device(x)
    for part, tensor, found in zip(bucket.parts, bucket.alone.tensors, kernels.moments(v, bucket.parts), strict=True):
        wanted = np.empty((tiles_of(part.length), 3))
        loops.moments(x[tensor.slice], wanted)
        same_bits(found, wanted)

    payload = kernels.runtime.host_array(bucket.encoder._size, np.uint8)
    payload[...] = 0xAB
    message, count = bucket.write(v, x, payload)
    np.testing.assert_array_equal(payload, message)
    same_bits(to_host(v), x)

    values = bucket.algorithm.decode(message, count, bucket.alone.spec).values
    messages, factor = [payload, payload.copy(), payload.copy()], 1 / 3
    sums = [sum((each * np.dtype(dtype).type(factor) for _ in messages), np.zeros(each.size, dtype)) for each in values]
    targets = [to_device(np.full(p.length, 7, dtype)) for p in bucket.parts]
    found = kernels.add_codes(targets, bucket.parts, messages, factor)
    assert found == (False, not all(np.isfinite(each).all() for each in sums))
    for target, wanted in zip(targets, sums, strict=True):
        same_bits(to_host(target), wanted)

    places = [v[t.slice] for t in bucket.alone.tensors]
    found = kernels.add_codes(places, bucket.parts, messages[:1], -1.0, adds=True)
    for tensor, each in zip(bucket.alone.tensors, values, strict=True):
        x[tensor.slice] -= each
    assert found == (False, not np.isfinite(x).all())
    same_bits(to_host(v), x)
