"""A bucket whose entries are added up by owners: each rank is the owner of some positions, for all ranks.

Every rank sends its selected entries to their owners, in parts of a fixed size (alltoall). An owner adds them in rank
order to its residual w, and sends the largest sums to all ranks, in its message. The rest stays in w. Coded small
tensors are divided among the owners, too; all their sums are sent. P = number of ranks, c = bytes of a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from dgc.core.codecs import SmallCodec, SparseCodec
from dgc.core.collectives import Transport
from dgc.core.compressors.base import SparseValues
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.encoders import TopKEncoder
from dgc.core.exchange.plan import Plan
from dgc.core.exchange.sizes import Setting, gathering
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Kernels, SegmentWork, is_finite
from dgc.core.kernels.reference import top_k
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.message import Form, Incoming
from dgc.core.state import BucketState
from dgc.core.stripes import Stripes, owners_of
from dgc.errors import DGCError, LayoutError, WireError

# An owner sends this many sums for each entry of an average part. benchmarks/results/README.md has other numbers.
SUMS_PER_ENTRY: float = 8

# The codecs to choose from for an owner's sums, by the codec of entries; the shorter one is used. With two bits the
# loss rises, and with eight it does not fall. "int8" has one scale for each tensor, and "int4" has eight.
SUM_VALUES: dict[str, tuple[str, ...]] = dict.fromkeys(("int2", "int3", "int4"), ("int4", "int8"))

# A part has room for the mean number of entries plus this many standard deviations. One part in 44 overflows. The
# entries that do not fit, less than 0.9 % / sqrt(mean) of all, are sent later.
PART_MARGIN = 2.0

# The bytes before a part's entries. A part has no flags: the sender's message, which follows, carries them.
PART_HEADER = np.dtype([("magic", "S4"), ("count", "<u4")])
PART_MAGIC = b"DGCp"
_HEAD = PART_HEADER.itemsize


class Owners(Plan):
    """The reduce-scatter, whose sums are the entries of an ordinary message.

    Attributes:
        capacity: the most entries in a part, which one rank sends to one owner.
        part_bytes: c.
        ks: the most sums of each tensor that one owner sends.
        first: for each owner, the codec of the parts that it receives.
        second: for each owner, the codec of its sums.
    """

    way = "owners"

    def __init__(self, setting: Setting, encoder: TopKEncoder) -> None:
        bucket, config, _, ranks, rank = setting
        self._stripes = [Stripes(bucket, owner, ranks) for owner in range(ranks)]
        self.stripes, places, k = self._stripes[rank], self._stripes[rank].sparse_size, sum(encoder.ks)
        mean, values = k / ranks, setting.values
        self.capacity = min(places, math.ceil(mean + PART_MARGIN * math.sqrt(mean)))
        self.ks = tuple(min(places, math.ceil(SUMS_PER_ENTRY * each / ranks)) for each in encoder.ks)
        self.first = [SparseCodec(each, self.capacity, config.indices, values) for each in self._stripes]
        most = min(places, sum(self.ks))
        sums = (SparseCodec(self.stripes, most, config.indices, name) for name in SUM_VALUES.get(values, (values,)))
        chosen = min(sums, key=lambda codec: codec.max_bytes)
        self.second = [SparseCodec(each, most, config.indices, chosen.values.name) for each in self._stripes]
        coded = setting.small != "float32" and bucket.small_size
        codecs = [SmallCodec(bucket, setting.small, each.small) for each in self._stripes] if coded else []
        small_bytes = max((each.max_bytes for each in codecs), default=0)
        self._small_at = _HEAD + self.first[0].max_bytes  # where the small tensors' block begins in a part
        self.part_bytes = self._small_at + small_bytes
        start = bucket.sparse_size
        vector = DenseVector(setting, start=start, origin=start, is_coded=bool(codecs))
        form = Form(
            (encoder.ids[0], int(chosen.indices.id), int(chosen.values.id)),
            sum(self.ks),
            chosen.max_bytes,
            small_bytes,
            vector.inline_bytes,
            int(codecs[0].values.id) if codecs else 0,
        )
        super().__init__(setting, encoder, vector, form, codecs)
        self.traffic = self.traffic.then(gathering(self.part_bytes, ranks))
        self.added += k
        self.largest = max(self.largest, ranks * self.part_bytes)
        self.small_bytes += (ranks - 1) * small_bytes
        self.holds = ("w", "owned_error") if codecs else ("w",)

    # -- first phase: parts --------------------------------------------------------------------------------------------

    @override
    def begin(self, step: Step) -> None:
        super().begin(step)
        self._parts_are_out = False

    @override
    def prepare(self, transport: Transport, kernels: Kernels) -> None:
        if not self._is_ready:
            self._parts, self._came = np.zeros((2, self._ranks, self.part_bytes), np.uint8)
            self._next_w, self._zeros = np.zeros((2, self._stripes[0].sparse_size), np.float32)
            self._next_error = np.zeros(self._bucket.small_size, np.float32)
        super().prepare(transport, kernels)

    @override
    def release(self) -> None:
        super().release()
        self._parts = self._came = np.empty((0, 0), np.uint8)
        self._next_w = self._zeros = self._next_error = np.empty(0, np.float32)

    @override
    def _blocks(self) -> Sequence[np.ndarray]:
        return [part[self._small_at :] for part in self._parts if self.small_codecs]

    @override
    def exchange(self, state: BucketState, *, nonfinite: bool, joined: int, absent: int) -> list[Incoming]:
        selected = self.encoder.sent()
        assert isinstance(selected, SparseValues), "the kernels select"
        self._sent = self.write_parts(selected)
        self.send_parts()
        count, overflows = self.add_up_parts(state)
        return self._exchange(count, nonfinite=nonfinite | overflows, joined=joined, absent=absent)

    def write_parts(self, entries: SparseValues) -> SparseValues:
        """Write a part for each owner; return the entries in the parts, with the values that the owners decode.

        If entries do not fit into a part, the smallest stay in this rank's residual.
        """
        owners = owners_of(entries.positions, self._ranks)
        ends = np.cumsum(np.bincount(owners, minlength=self._ranks))
        by_owner = np.split(np.argsort(owners, kind="stable"), ends[:-1])
        values, is_sent = entries.values.copy(), np.ones(entries.positions.size, bool)
        for rank, (part, chosen) in enumerate(zip(self._parts, by_owner, strict=True)):
            if chosen.size > self.capacity:
                is_sent[chosen] = False
                chosen = chosen[top_k(values[chosen], self.capacity)]
                is_sent[chosen] = True
            places = self._stripes[rank].places(entries.positions[chosen])
            values[chosen] = self.first[rank].encode(places, values[chosen], part[_HEAD : self._small_at])
            part[:_HEAD].view(PART_HEADER)[0] = (PART_MAGIC, chosen.size)
        return SparseValues(entries.positions[is_sent], values[is_sent])

    def send_parts(self) -> None:
        """Send the parts, and receive those for this rank. Blocking."""
        self._parts_are_out = True
        self._transport.alltoall(self._parts, self._came)
        self._step.stats.count_collective(self.part_bytes * (self._ranks - 1))

    @override
    def send_error(self, error: DGCError, parameter: int | None) -> None:
        if not self._parts_are_out:  # send parts without entries; the message carries the error
            self._parts.fill(0)
            for part in self._parts:
                part[:_HEAD].view(PART_HEADER)["magic"] = PART_MAGIC
            self.send_parts()
        super().send_error(error, parameter)

    # -- between the phases, on the owner ------------------------------------------------------------------------------

    def add_up_parts(self, state: BucketState) -> tuple[int, bool]:
        """Put the largest sums and the small tensors' sums into the message; note what is left over.

        Returns:
            The number of sums, and whether one is not finite.

        Raises:
            WireError: a part is damaged.
        """
        rank, codecs, w, error = self._transport.rank, self.small_codecs, self._next_w, self._next_error
        payload, coded = self.messages.payload, self.messages.coded
        w[...], error[...] = state.w, state.owned_error
        payload.fill(0)
        coded.fill(0)
        for sender, part in enumerate(self._came):
            try:
                count = _count_entries(part)
                places, values = self.first[rank].decode(part[_HEAD : self._small_at], count)
                if codecs:
                    codecs[rank].add(part[self._small_at :], error)
            except (WireError, LayoutError) as damage:
                origin = f"{self._transport.label(sender)} for bucket {self._bucket.index}"
                raise WireError(f"part of {origin}: {damage}") from damage
            w[places] += values
        work = [
            SegmentWork(gradient=self._zeros[part], offset=part.start, length=part.stop - part.start, k=k)
            for part, k in zip(self._stripes[rank].slices.values(), self.ks, strict=True)
        ]
        # Do not learn thresholds: they are not saved, so a resumed run would select other sums.
        chosen = self._kernels.on_host.accumulate_and_select(work, self._zeros, w, new_thresholds(len(work)))
        values = self.second[rank].encode(chosen.positions, chosen.values, payload)
        w[chosen.positions] -= values
        overflows = chosen.nonfinite or not is_finite(error)
        if codecs and not overflows:
            codecs[rank].encode(error.copy(), coded, error)
        return chosen.positions.size, overflows

    # -- second phase: sums --------------------------------------------------------------------------------------------

    @override
    def add_up(self, messages: Sequence[Incoming], factor: float) -> bool:
        return self._add_up([self.decode(message) for message in messages], factor)

    def decode(self, message: Incoming) -> SparseValues:
        """Read the sums that an owner has sent."""
        with message.blamed():
            places, values = self.second[message.sender].decode(message.payload, message.count)
            return SparseValues(self._stripes[message.sender].positions(places), values)

    @property
    @override
    def count(self) -> int:
        return self._sent.positions.size

    @override
    def sent(self) -> SparseValues:
        return self._sent

    @override
    def commit(self, state: BucketState) -> None:
        super().commit(state)
        if self.encoder.keeps_residual:
            state.w[...], state.owned_error[...] = self._next_w, self._next_error


def _count_entries(part: np.ndarray) -> int:
    magic, count = part[:_HEAD].view(PART_HEADER)[0].item()
    if magic != PART_MAGIC:
        raise WireError(f"it begins with {magic!r}, expected {PART_MAGIC!r}: it is damaged, or ranks are out of step")
    return int(count)
