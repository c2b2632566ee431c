"""How one bucket is sent at one density: message sizes, and sparse message or dense sum. The same on every rank.

Everything here follows from the layout, the density, the codecs and the number of ranks P alone, so the ranks agree
without asking each other, and a resumed run decides as the first one did.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from dgc.core.codecs import SPARSE_ID, SmallCodec, SparseCodec
from dgc.core.config import entries_to_send
from dgc.core.header import HEADER_BYTES
from dgc.core.layout import Bucket
from dgc.errors import LayoutError

MIN_MESSAGE_BYTES = 256
"""Room for the text of an error in every message."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""MPI counts are int32."""

INLINE_EXTRA_BYTES = 64 * 1024
INLINE_MAX_BYTES = 1024 * 1024


class Mode(enum.Enum):
    """What happens to a bucket's sparsified tensors in one step."""

    DENSE = "dense"
    """Before the ramp-up: the gradient itself, as a dense sum."""
    SPARSE = "sparse"
    """Selected entries as a message to every rank."""
    SUM = "sum"
    """Selected entries in a vector of zeros, as a dense sum: the same mathematics, fewer bytes at high density."""


@dataclass(frozen=True)
class BucketPlan:
    """Sizes of one bucket's traffic.

    The *vector* covers positions ``vector_start`` to ``bucket.size``: what is summed densely. Where ``small`` is given,
    its first ``bucket.small_size`` elements are sent coded inside the message. The rest, the *plain* part, is sent
    inside the message (``inline``) when that saves a collective, else by allreduce.
    """

    mode: Mode
    density: float | None
    """Of the schedule in this step; None in a dense step."""
    ids: tuple[int, int, int]
    """Numbers of the compressor, the index codec and the value codec in the header."""
    ks: tuple[int, ...]
    itemsize: int
    payload_bytes: int
    vector_start: int
    vector_size: int
    inline: bool
    message_bytes: int
    small: SmallCodec | None = None
    selection: SparseCodec | None = None

    @cached_property
    def is_active(self) -> bool:
        """Whether an encoder has anything to do: a sparsified step, and a tensor that is."""
        return self.mode is not Mode.DENSE and bool(self.ks)

    @cached_property
    def codec(self) -> SparseCodec:
        """What writes and reads selected entries."""
        assert self.selection is not None, "the plan is one of selected entries"
        return self.selection

    @cached_property
    def plain_start(self) -> int:
        """Where the plain part begins in the vector."""
        return self.small.size if self.small else 0

    @cached_property
    def coded_bytes_at(self) -> int:
        """Offset of the coded small tensors in the message, which is where its dense section begins."""
        return HEADER_BYTES + self.payload_bytes

    @cached_property
    def coded_bytes(self) -> int:
        """Bytes of the coded small tensors; 0 when they are not sent coded."""
        return self.small.max_bytes if self.small else 0

    @cached_property
    def inline_bytes_at(self) -> int:
        """Offset of the inline vector in the message."""
        return self.coded_bytes_at + self.coded_bytes

    @cached_property
    def inline_bytes(self) -> int:
        """Bytes of the vector's plain part; 0 when it is not in the message."""
        return (self.vector_size - self.plain_start) * self.itemsize if self.inline else 0

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the message's dense section: coded small tensors, then the inline vector."""
        return self.coded_bytes + self.inline_bytes

    @cached_property
    def allreduces(self) -> bool:
        """Whether an allreduce of the vector's plain part follows the message."""
        return self.vector_size > self.plain_start and not self.inline


def make_plan(
    bucket: Bucket,
    *,
    density: float | None,
    ranks: int,
    indices: str,
    values: str,
    compressor: int = SPARSE_ID,
    small: str = "float32",
) -> BucketPlan:
    """Decide how ``bucket`` is sent as selected entries, with these codecs; other arguments as for :func:`plan_for`."""
    ks = () if density is None else tuple(entries_to_send(s.length, density) for s in bucket.sparse)
    codec = SparseCodec(bucket, sum(ks), indices, values)
    ids = (compressor, int(codec.indices.id), int(codec.values.id))
    return plan_for(bucket, ids, ks, codec.max_bytes, density=density, ranks=ranks, small=small, selection=codec)


def plan_for(
    bucket: Bucket,
    ids: tuple[int, int, int],
    ks: tuple[int, ...],
    payload_bytes: int,
    *,
    density: float | None,
    ranks: int,
    small: str = "float32",
    selection: SparseCodec | None = None,
) -> BucketPlan:
    """Decide how ``bucket`` is sent when its sparsified tensors make up to ``payload_bytes`` of payload."""
    itemsize = 8 if bucket.dtype == "float64" else 4
    mode, payload = Mode.DENSE, payload_bytes
    if density is not None:
        # Ring costs: every message passes every rank; a dense sum moves 2 (P - 1) / P of the vector.
        gathered = (ranks - 1) * payload
        reduced = 2 * (ranks - 1) / ranks * itemsize * bucket.sparse_size
        mode = Mode.SUM if gathered > reduced else Mode.SPARSE
    if mode is not Mode.SPARSE:
        payload = 0
    start = bucket.sparse_size if mode is Mode.SPARSE else 0
    vector = bucket.size - start
    coder = _small_codec(bucket, small, ranks) if mode is Mode.SPARSE and density is not None else None
    plain = (vector - (coder.size if coder else 0)) * itemsize
    inline = plain == 0 or _inline(plain, plain, ranks)
    message = HEADER_BYTES + payload + (coder.max_bytes if coder else 0) + (plain if inline else 0)
    message = max(MIN_MESSAGE_BYTES, message)
    if message > MAX_MESSAGE_BYTES:
        raise LayoutError(
            f"bucket {bucket.index} would send a message of {message} bytes; the limit is 2 GiB: "
            "choose a higher sparsity, or exclude its largest parameter"
        )
    return BucketPlan(mode, density, ids, ks, itemsize, payload, start, vector, inline, message, coder, selection)


def _small_codec(bucket: Bucket, name: str, ranks: int) -> SmallCodec | None:
    """What codes the bucket's small tensors; None where there are none, or an allreduce moves fewer bytes."""
    if name == "float32" or not bucket.small_size:
        return None
    coder = SmallCodec(bucket, name)
    return coder if _inline(coder.max_bytes, 4 * bucket.small_size, ranks) else None


def _inline(inside: int, reduced: int, ranks: int) -> bool:
    """Whether a dense vector is better off inside the message than in an allreduce of its own.

    It costs ``(P - 1)`` times its bytes in there, ``inside``, instead of ``2 (P - 1) / P`` times those that an
    allreduce would get, ``reduced``, but saves a collective: worth about 64 KiB (50 us at 10 Gbit/s). Large vectors
    always go by allreduce, which needs no P-fold buffer.
    """
    extra = (ranks - 1) * inside - 2 * (ranks - 1) / ranks * reduced
    return inside <= INLINE_MAX_BYTES and extra <= INLINE_EXTRA_BYTES
