"""Encoders select what a bucket's sparsified tensors send at one density, write it into a payload, and read payloads.

:class:`TopKEncoder` selects the k largest accumulated entries of each tensor, as DGC does (Source: arXiv 1712.01887,
Algorithm 4). :class:`AlgorithmEncoder` lets any other compressor write the payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from dgc.core.codecs import SparseCodec, padded
from dgc.core.collectives import Transport
from dgc.core.compressors import OWN_NUMBERS, compressor_class
from dgc.core.compressors.base import Algorithm, BucketSpec, DenseValues, SparseValues, StepInfo, Tensor
from dgc.core.config import DGCConfig, entries_to_send
from dgc.core.exchange.sizes import Setting
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Kernels, SegmentWork, Selection, is_finite
from dgc.core.layout import Layout
from dgc.core.state import BucketState
from dgc.errors import ConfigError


class Encoder(ABC):
    """The entries of one bucket at one density. Only the communication thread uses it, until a step ends.

    Attributes:
        ids: numbers of the compressor, the index codec and the value codec in the header.
        ks: the most entries of each tensor; empty in a step without compression, or if no tensor is sparsified.
        max_bytes: bytes of a payload.
        count: how many entries were selected in the latest step.
        keeps_residual: whether entries that are not sent stay in the residual.
    """

    count = 0

    def __init__(self, setting: Setting, ids: tuple[int, int, int], ks: tuple[int, ...], max_bytes: int) -> None:
        self._config, self._elements = setting.config, sum(s.length for s in setting.bucket.sparse)
        self.ids, self.ks, self.max_bytes = ids, ks, max_bytes
        self.keeps_residual = setting.config.keeps_residual

    @abstractmethod
    def begin(self, kernels: Kernels, work: Sequence[SegmentWork], state: BucketState) -> Callable[[], Any]:
        """Add the gradients to u and v. Other threads or a device may begin this work.

        Returns:
            A function for :meth:`select`, which waits for the work or does it. Call it once, whatever happens.
        """

    @abstractmethod
    def select(self, step: Step, state: BucketState, payload: np.ndarray | None, begun: Callable[[], Any]) -> bool:
        """Select entries, and write them into the payload.

        Args:
            step: the step.
            state: the bucket's state. Only u, v and the thresholds change before the commit.
            payload: (max_bytes,) uint8; None if the entries that :meth:`sent` returns are sent in another way.
            begun: from :meth:`begin`.

        Returns:
            Whether a gradient is not finite.
        """

    def catch_up(self, step: Step) -> None:
        """After an error, call the collectives of :meth:`select` that this rank has missed and the others call."""
        return

    @abstractmethod
    def sent(self) -> SparseValues | DenseValues:
        """Return the latest step's entries. If they were coded, the values are the decoded ones."""

    @abstractmethod
    def decode(self, payload: np.ndarray, count: int) -> SparseValues | DenseValues:
        """Read a payload with ``count`` entries.

        Raises:
            WireError: the payload is damaged.
            LayoutError: a position lies in no tensor.
        """

    def masks(self) -> bool:
        """Return whether u is set to 0 at the entries that were sent, to forget stale momentum.

        If all entries were sent, no momentum is stale.
        """
        return self._config.masks and self.count < self._elements

    def finish(self, state: BucketState, *, refused: bool) -> None:
        """End a step, refused or not."""
        return


class TopKEncoder(Encoder):
    """Momentum correction and selection in one pass."""

    _sent: SparseValues

    def __init__(self, setting: Setting) -> None:
        bucket, density = setting.bucket, setting.density
        ks = () if density is None else tuple(entries_to_send(s.length, density) for s in bucket.sparse)
        self.codec = codec = SparseCodec(bucket, sum(ks), setting.config.indices, setting.values)
        ids = (compressor_class(setting.config.algorithm).number, int(codec.indices.id), int(codec.values.id))
        super().__init__(setting, ids, ks, codec.max_bytes)

    @override
    def begin(self, kernels: Kernels, work: Sequence[SegmentWork], state: BucketState) -> Callable[[], Selection]:
        return kernels.begin_selection(work, state.u, state.v, state.thresholds)

    @override
    def select(self, step: Step, state: BucketState, payload: np.ndarray | None, begun: Callable[[], Any]) -> bool:
        selection: Selection = begun()
        positions, values = selection.positions, selection.values
        if payload is not None:
            values = self.codec.encode(positions, values, payload)
        self._sent, self.count = SparseValues(positions, values), positions.size
        return selection.nonfinite

    @override
    def sent(self) -> SparseValues:
        return self._sent

    @override
    def decode(self, payload: np.ndarray, count: int) -> SparseValues:
        return SparseValues(*self.codec.decode(payload, count))

    @override
    def masks(self) -> bool:
        return self._config.masks and sum(self.ks) < self._elements  # entries that are 0 are not sent


class AlgorithmEncoder(Encoder):
    """Accumulates gradients, then lets a compressor write the payload.

    Before it can encode, a compressor may need the maximum of some numbers over the ranks. This costs an allreduce.
    """

    def __init__(
        self, setting: Setting, algorithm: Algorithm, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
        if kernels.on_device:
            raise ConfigError(f"{algorithm.name!r} works on host memory; give it the kernels of the CPU")
        self._algorithm, self._transport, self._memory = algorithm, transport, kernels.memory
        places = ((layout.parameters[s.parameter], s) for s in setting.bucket.sparse)
        tensors = tuple(Tensor(p.name, p.shape, s.offset, s.length) for p, s in places)
        self._spec = spec = BucketSpec(setting.bucket, tensors, setting.density or 1.0, layout.sparse_numel)
        if setting.density is None or not tensors:
            super().__init__(setting, (algorithm.number, 0, 0), (), 0)
        else:
            ids, ks = (algorithm.number, *algorithm.codec_ids(spec)), algorithm.max_counts(spec)
            super().__init__(setting, ids, ks, padded(algorithm.max_bytes(spec)))
        self.keeps_residual &= algorithm.error_feedback
        self._room = self._written = np.empty(0, np.uint8)  # for a payload that is not sent; the last payload
        self._caught_up: Step | None = None  # the last step in which this rank has called the allreduce

    @override
    def begin(self, kernels: Kernels, work: Sequence[SegmentWork], state: BucketState) -> Callable[[], Any]:
        return lambda: self._accumulate(kernels, work, state)

    @override
    def select(self, step: Step, state: BucketState, payload: np.ndarray | None, begun: Callable[[], Any]) -> bool:
        algorithm, spec = self._algorithm, self._spec
        nonfinite: bool
        nonfinite, increment = begun()
        info = StepInfo(step.number, self._transport.rank, self._config.seed, state.thresholds, increment=increment)
        if algorithm.shares:
            info.shared = self._largest(step, algorithm.prepare(state.v, spec))
        if payload is None:
            if not self._room.size:
                self._room = self._memory.host_array(self.max_bytes, np.uint8)
            payload = self._room
        self.count, used = algorithm.encode(state.v, payload, spec, info)
        payload[used:] = 0
        self._written = payload
        return nonfinite

    @override
    def catch_up(self, step: Step) -> None:
        if self.ks and self._algorithm.shares and self._caught_up is not step:
            self._largest(step, np.zeros(len(self.ks)))

    @override
    def sent(self) -> SparseValues | DenseValues:
        return self.decode(self._written, self.count)

    @override
    def decode(self, payload: np.ndarray, count: int) -> SparseValues | DenseValues:
        return self._algorithm.decode(payload, count, self._spec)

    @override
    def masks(self) -> bool:
        return super().masks() and not self._algorithm.has_room_for_all(self._spec)

    @override
    def finish(self, state: BucketState, *, refused: bool) -> None:
        self._algorithm.finish(self._spec, state.thresholds, refused=refused)

    # -- inside --------------------------------------------------------------------------------------------------

    def _accumulate(
        self, kernels: Kernels, work: Sequence[SegmentWork], state: BucketState
    ) -> tuple[bool, np.ndarray | None]:
        if not self._algorithm.needs_increment:
            return kernels.accumulate(work, state.u, state.v), None
        increment = np.zeros_like(state.v)
        nonfinite = kernels.accumulate(work, state.u, increment)
        state.v += increment
        if is_finite(state.v):
            return nonfinite, increment
        state.v[~np.isfinite(state.v)] = 0
        return True, increment

    def _largest(self, step: Step, numbers: np.ndarray) -> np.ndarray:
        largest = np.ascontiguousarray(numbers, np.float64)
        self._transport.allreduce(largest, "max")
        self._caught_up = step
        step.stats.count_collective(largest.nbytes)
        return largest


def kernels_select(config: DGCConfig) -> bool:
    """Return whether the kernels select entries in the compressor's place; only then it works on a GPU's memory."""
    row = compressor_class(config.algorithm)
    return is_unchanged(row) and row.is_plain_selection(config)


# A compressor that overrides only these names still encodes as its base class does.
_LABELS = ("name", "number", "source", "bits", "Options", "defaults", "_abc_impl")


def is_unchanged(row: type[Algorithm]) -> bool:
    """Return whether a class encodes like a compressor of this package. Then the kernels may select in its place.

    A user's class that derives from such a compressor may send something else. Then its own methods must be called.
    """
    for each in row.__mro__:
        if vars(each).get("number") in OWN_NUMBERS:
            return True
        if any(name not in _LABELS and (name == "__init__" or not name.startswith("__")) for name in vars(each)):
            return False
    return False
