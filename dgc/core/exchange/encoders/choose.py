"""Which class does a bucket's step: by compressor, and by where the arrays are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dgc.core.compressors.base import Algorithm, Moment, Room, Tensor
from dgc.core.compressors.registry import compressor_class
from dgc.core.config.composite import WRAPPERS, Parts
from dgc.core.config.config import DGCConfig
from dgc.core.config.schedule import Schedule
from dgc.core.exchange.bucket import BucketStep
from dgc.core.exchange.encoders.algorithm import AlgorithmStep
from dgc.core.exchange.encoders.composite import Part, PartStep
from dgc.core.kernels.base import Kernels
from dgc.core.state.layout import Bucket, Layout, Segment
from dgc.core.transport import Transport
from dgc.core.wire import padded


def make_steps(layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport) -> Sequence[BucketStep]:
    """One step for each bucket.

    Raises:
        ConfigError: the compressor works on host memory and the kernels do not.
    """
    if config.algorithm not in WRAPPERS:
        return _steps(layout.buckets, layout, config, kernels, transport)
    parts: Parts = config.own
    made: dict[int, list[Part]] = {b.index: [] for b in layout.buckets}
    for place, (key, member) in enumerate(zip(parts.keys, parts.configs, strict=True)):
        by_step = config.algorithm == "by_step"
        # Buckets of tensors that no member compresses stand with the first one, which only sums them.
        mine = [b for b in layout.buckets if by_step or b.part == place]
        first = max(config.rampup_begin_step, key) if by_step else config.rampup_begin_step
        member = member or next((c for c in parts.configs if c is not None), None) or DGCConfig()
        member = dataclasses.replace(member, op=config.op)  # the optimizer's, which the members were made without
        schedule = Schedule(member.sparsity, first, member.rampup_step)
        for step in _steps(mine, layout, member, kernels, transport):
            made[step.bucket.index].append(Part(first, step, schedule))
    return [PartStep(b, made[b.index]) for b in layout.buckets]


def runs_on_devices(config: DGCConfig) -> bool:
    """Whether the compressor works on a GPU's own memory; the others get copies in host memory."""
    return config.algorithm not in WRAPPERS and compressor_class(config.algorithm).is_plain_selection(config)


def _steps(
    buckets: Sequence[Bucket], layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport
) -> Sequence[BucketStep]:
    row = compressor_class(config.algorithm)
    if row.is_plain_selection(config):
        make = _selection_class(kernels)
        return [make(b, config, kernels, transport) for b in buckets]
    for dtype in sorted({b.dtype for b in buckets}):
        _warm_up(row(config), dtype, kernels)
    algorithm = row(config)
    return [AlgorithmStep(b, algorithm, kernels, transport, layout) for b in buckets]


def _warm_up(algorithm: Algorithm, dtype: str, kernels: Kernels) -> None:
    """Compile what the first step would otherwise wait for, by a message of an object that is then thrown away."""
    n = 64
    tensor = Tensor("warm-up", (8, 8), 0, n)
    room = Room(Bucket(0, dtype, (Segment(0, 0, n),), (), n, n), (tensor,), 1.0, n)
    x = np.linspace(-1, 1, n).astype(dtype)
    moment = Moment(0, 0, 0, kernels.new_control(1), algorithm.prepare(x, room), x)
    out = np.zeros(padded(algorithm.max_bytes(room)), np.uint8)
    count, _ = algorithm.encode(x, out, room, moment)
    algorithm.decode(out, count, room)


def _selection_class(kernels: Kernels) -> type[BucketStep]:
    if not getattr(kernels, "on_device", False):
        return BucketStep
    from dgc.core.exchange.encoders.device import DeviceBucketStep

    return DeviceBucketStep
