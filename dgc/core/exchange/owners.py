"""The reduce-scatter of a bucket: each rank is the owner of some positions, and adds up their entries.

Every rank sends its selected entries to their owners, in parts of a fixed size (alltoall). An owner adds them in rank
order to its residual w, and puts the largest sums into the bucket's ordinary message, which all ranks receive. The rest
stays in w. P = number of ranks, c = bytes of a part.
"""

from __future__ import annotations

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.compressors.base import SparseValues
from dgc.core.kernels.base import Kernels, SegmentWork, is_finite
from dgc.core.kernels.reference import top_k
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Bucket
from dgc.core.message import PART_HEADER, PART_MAGIC, BucketPlan, Dealing, Incoming
from dgc.core.state import BucketState
from dgc.core.stripes import owners_of
from dgc.errors import LayoutError, WireError

_HEAD = PART_HEADER.itemsize


class Owners:
    """One bucket's reduce-scatter.

    Attributes:
        are_out: whether this rank has sent its parts in this step.
        next_w: (n,) float32: the next value of w, if the step is committed.
        next_owned_error: (N,) float32: the next error of the small tensors' sums, if the step is committed.
        small_blocks: for each part, the (small_bytes,) uint8 for small tensors.
    """

    _dealing: Dealing

    def __init__(self, bucket: Bucket, transport: Transport, kernels: Kernels) -> None:
        """Allocate nothing yet; :meth:`start` allocates buffers."""
        self._bucket, self._transport, self._kernels = bucket, transport, kernels
        self._parts = self._came = np.empty((0, 0), np.uint8)
        self.next_w = self._zeros = np.empty(0, np.float32)
        self.next_owned_error = np.zeros(bucket.small_size, np.float32)
        self.small_blocks: list[np.ndarray] = []
        self.are_out = False

    def start(self, plan: BucketPlan) -> None:
        """Begin a step."""
        assert plan.dealing is not None, "the plan is one of owners"
        self._dealing, self.are_out = plan.dealing, False
        ranks, size = self._transport.size, plan.dealing.part_bytes
        if self._parts.shape != (ranks, size):
            self._parts, self._came = np.zeros((ranks, size), np.uint8), np.zeros((ranks, size), np.uint8)
        self.small_blocks = [part[plan.dealing.small_at :] for part in self._parts if plan.dealing.small]
        if self._kernels.on_device:
            from dgc.core.kernels.cpu import NumbaKernels  # this import loads Numba

            self._kernels = NumbaKernels()
        places = plan.dealing.stripes[0].sparse_size
        if self.next_w.size != places:
            self.next_w, self._zeros = np.zeros(places, np.float32), np.zeros(places, np.float32)

    # -- first phase -------------------------------------------------------------------------------------------------

    def write_parts(self, entries: SparseValues) -> SparseValues:
        """Write a part for each owner; return the entries in the parts, with the values that the owners decode.

        If entries do not fit into a part, the smallest stay in this rank's residual.
        """
        dealing, ranks = self._dealing, self._transport.size
        owners = owners_of(entries.positions, ranks)
        ends = np.cumsum(np.bincount(owners, minlength=ranks))
        by_owner = np.split(np.argsort(owners, kind="stable"), ends[:-1])
        values, is_sent = entries.values.copy(), np.ones(entries.positions.size, bool)
        for rank, (part, chosen) in enumerate(zip(self._parts, by_owner, strict=True)):
            if chosen.size > dealing.capacity:
                is_sent[chosen] = False
                chosen = chosen[top_k(values[chosen], dealing.capacity)]
                is_sent[chosen] = True
            places = dealing.stripes[rank].places(entries.positions[chosen])
            values[chosen] = dealing.first[rank].encode(places, values[chosen], part[_HEAD : dealing.small_at])
            part[:_HEAD].view(PART_HEADER)[0] = (PART_MAGIC, chosen.size)
        return SparseValues(entries.positions[is_sent], values[is_sent])

    def exchange(self) -> None:
        """Send the parts, and receive those for this rank. Blocking."""
        self.are_out = True
        self._transport.alltoall(self._parts, self._came)

    def send_nothing(self, plan: BucketPlan) -> None:
        """Send parts without entries, because this rank has failed. Its message carries the error."""
        self.start(plan)
        self._parts.fill(0)
        for part in self._parts:
            part[:_HEAD].view(PART_HEADER)["magic"] = PART_MAGIC
        self.exchange()

    # -- between the phases, on the owner ------------------------------------------------------------------------------

    def add_up(self, state: BucketState, payload: np.ndarray, coded: np.ndarray) -> tuple[int, bool]:
        """Write the largest sums into the payload and the small tensors' sums into ``coded``; store what is left over.

        Returns:
            The number of sums, and whether one is not finite.

        Raises:
            WireError: a part is damaged.
        """
        dealing, rank = self._dealing, self._transport.rank
        stripes, w = dealing.stripes[rank], self.next_w
        w[...], self.next_owned_error[...] = state.w, state.owned_error
        payload.fill(0)
        coded.fill(0)
        for sender, part in enumerate(self._came):
            try:
                count = _count_entries(part)
                places, values = dealing.first[rank].decode(part[_HEAD : dealing.small_at], count)
                if dealing.small:
                    dealing.small[rank].add(part[dealing.small_at :], self.next_owned_error)
            except (WireError, LayoutError) as error:
                origin = f"{self._transport.label(sender)} for bucket {self._bucket.index}"
                raise WireError(f"part of {origin}: {error}") from error
            w[places] += values
        work = [
            SegmentWork(gradient=self._zeros[part], offset=part.start, length=part.stop - part.start, k=k)
            for part, k in zip(stripes.slices.values(), dealing.ks, strict=True)
        ]
        # Do not learn thresholds: they are not saved, so a resumed run would select other sums.
        chosen = self._kernels.accumulate_and_select(work, self._zeros, w, new_thresholds(len(work)))
        values = dealing.second[rank].encode(chosen.positions, chosen.values, payload)
        w[chosen.positions] -= values
        overflows = chosen.nonfinite or not is_finite(self.next_owned_error)
        if dealing.small and not overflows:
            dealing.small[rank].encode(self.next_owned_error.copy(), coded, self.next_owned_error)
        return chosen.positions.size, overflows

    # -- second phase --------------------------------------------------------------------------------------------------

    def decode(self, message: Incoming) -> SparseValues:
        """Read the sums that an owner has sent.

        Raises:
            WireError: the payload is damaged.
        """
        places, values = self._dealing.second[message.sender].decode(message.payload, message.count)
        return SparseValues(self._dealing.stripes[message.sender].positions(places), values)


def _count_entries(part: np.ndarray) -> int:
    magic, count = part[:_HEAD].view(PART_HEADER)[0].item()
    if magic != PART_MAGIC:
        raise WireError(f"it begins with {magic!r}, expected {PART_MAGIC!r}: it is damaged, or ranks are out of step")
    return int(count)
