"""Which encoder a bucket gets: by compressor, and by where the arrays are."""

from __future__ import annotations

import numpy as np

from dgc.core.codecs import padded
from dgc.core.compressors import OWN_NUMBERS, compressor_class
from dgc.core.compressors.base import Algorithm, BucketSpec, StepInfo, Tensor
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders.algorithm import AlgorithmEncoder
from dgc.core.exchange.encoders.base import Encoder
from dgc.core.exchange.encoders.dense_vector import DenseVector, DeviceVector
from dgc.core.exchange.encoders.topk import TopKEncoder
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Bucket, Layout, Segment
from dgc.core.transport import Transport

_LABELS = ("name", "number", "source", "bits", "Options", "defaults", "_abc_impl")
"""What a compressor may have of its own and still encode as the one that it derives from."""


def make_encoders(
    layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport
) -> list[tuple[Encoder, DenseVector]]:
    """The encoder and the dense vector of each bucket of the layout.

    Raises:
        ConfigError: the compressor works on host memory and the kernels do not.
        LayoutError: a message would be too large at a sparsity of the schedule.
    """
    own_share = config.own_share(transport.size)
    make = DeviceVector if kernels.on_device else DenseVector
    vectors = [make(bucket, kernels, own_share, config.error_feedback) for bucket in layout.buckets]
    encoders = _encoders(config, layout, kernels, transport)
    for encoder in encoders:
        for sparsity in config.sparsity:
            encoder.plan_at(1.0 - sparsity)
    return list(zip(encoders, vectors, strict=True))


def runs_on_devices(config: DGCConfig) -> bool:
    """Whether the compressor works on a GPU's own memory; others get copies in host memory."""
    row = compressor_class(config.algorithm)
    return is_unchanged(row) and row.is_plain_selection(config)


def is_unchanged(row: type[Algorithm]) -> bool:
    """Whether a compressor encodes as one of this package does, which the kernels' selection stands in for.

    A user's class may derive from one of ours and change what is sent: then its own methods have to be called.
    """
    for each in row.__mro__:
        if vars(each).get("number") in OWN_NUMBERS:
            return True
        if any(name not in _LABELS and (name == "__init__" or not name.startswith("__")) for name in vars(each)):
            return False
    return False


def _encoders(config: DGCConfig, layout: Layout, kernels: Kernels, transport: Transport) -> list[Encoder]:
    row, buckets = compressor_class(config.algorithm), layout.buckets
    if not (is_unchanged(row) and row.is_plain_selection(config)):
        _warm_up(row(config), kernels)
        algorithm = row(config)
        return [AlgorithmEncoder(b, algorithm, kernels, transport, layout) for b in buckets]
    return [TopKEncoder(b, config, kernels, transport.size) for b in buckets]


def _warm_up(algorithm: Algorithm, kernels: Kernels) -> None:
    """Compile what the first step would otherwise wait for, by a message of an object that is then thrown away."""
    n = 64
    tensor = Tensor("warm-up", (8, 8), 0, n)
    spec = BucketSpec(Bucket(0, "float32", (Segment(0, 0, n),), (), n, n), (tensor,), 1.0, n)
    x = np.linspace(-1, 1, n, dtype=np.float32)
    info = StepInfo(0, 0, 0, kernels.new_thresholds(1), algorithm.prepare(x, spec), x)
    out = np.zeros(padded(algorithm.max_bytes(spec)), np.uint8)
    count, _ = algorithm.encode(x, out, spec, info)
    algorithm.decode(out, count, spec)
