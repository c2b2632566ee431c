"""A bucket's message: its header, the sizes of its parts, and how it is written, exchanged and checked.

A receiver knows the expected value of each field of the header from its own configuration. A difference raises a
:class:`WireError` that names the sender, the field, both values and the usual cause. A receiver reads the rest of a
message only if all fields agree.

A :class:`BucketPlan` depends only on the layout, the density, the codecs and the number of ranks P. So the ranks agree
on all sizes without asking each other, and a resumed run makes the same plans.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dgc import errors
from dgc.core.codecs import IndexCodecId, SmallCodec, SparseCodec, ValueCodecId
from dgc.core.collectives import BYTE_LIMIT, Transport
from dgc.core.kernels.base import Memory
from dgc.core.layout import Bucket
from dgc.core.stripes import Stripes
from dgc.errors import LayoutError, WireError

MAGIC = b"DGCm"
VERSION = 1

# The bytes of a header. The offset of every field is a multiple of the field's size.
HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "u1"),
        ("compressor", "u1"),
        ("index_codec", "u1"),
        ("value_codec", "u1"),
        ("step", "<u8"),
        ("fingerprint", "<u8"),
        ("bucket", "<u4"),
        ("count", "<u4"),
        ("payload_bytes", "<u4"),
        ("dense_bytes", "<u4"),
        ("flags", "<u2"),
        ("error_code", "<u2"),
        ("error_parameter", "<u4"),
        ("dense_codec", "u1"),
        ("reserved", "V7"),
        ("absent", "<u8"),
    ]
)
# Constant within a version, and a multiple of the block alignment.
HEADER_BYTES = HEADER.itemsize
assert HEADER_BYTES == 64
_RESERVED = bytes(HEADER["reserved"].itemsize)


class Flags(enum.IntFlag):
    """Flags of a message. All other bits must be 0."""

    NONFINITE = 1  # the sender met a value that is not finite: the step is refused on every rank
    ERROR = 2  # the sender failed: error_code and error_parameter say how, and there are no entries
    JOINED = 4  # the sender has no data: its gradients are 0, and its fingerprint is not compared
    BY_TRAINING = 8  # with JOINED: from the next step on, averages are over the ranks that have not joined


_KNOWN_FLAGS = sum(Flags)


class Header(NamedTuple):
    """The fields of a header that differ between messages, in the order of :data:`HEADER`.

    Attributes:
        compressor: number of the algorithm.
        index_codec: :class:`IndexCodecId`.
        value_codec: :class:`ValueCodecId`.
        step: the sender's step.
        fingerprint: hash of the layout, momentum, Nesterov, weight decay, gain and learning rates.
        bucket: the bucket's number in the layout.
        count: entries, or an owner's sums, in the payload.
        payload_bytes: bytes of the payload: index block, value block, and zeros up to its fixed size.
        dense_bytes: bytes of the dense section after the payload; 0 if there is none.
        flags: :class:`Flags`.
        error_code: with ``Flags.ERROR``, the error's place in :data:`ERROR_CLASSES`.
        error_parameter: number of the parameter that the error is about.
        dense_codec: :class:`ValueCodecId` of the small tensors at the start of the dense section; 0 if there are none.
        absent: digest of the bucket's parameters without a gradient on the sender; 0 if all have one. It may differ
            between ranks.
    """

    compressor: int
    index_codec: int
    value_codec: int
    step: int
    fingerprint: int
    bucket: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    payload_bytes: int
    dense_bytes: int
    flags: int = 0
    error_code: int = 0
    error_parameter: int = 0
    dense_codec: int = 0
    absent: int = 0


_SPARSITY = "The message is damaged, or its sender uses another sparsity"
# The advice about a field that differs. The first difference in this order is reported.
_ADVICE = {
    "compressor": "Give every rank the same compression=.",
    "index_codec": "Give every rank the same indices= and the same sparsity.",
    "value_codec": "Give every rank the same values=.",
    "dense_codec": "Give every rank the same small= and the same sparsity.",
    "bucket": "The ranks exchange buckets in different orders: build the same model and compressor on every rank.",
    "step": "The ranks are out of step: call step() equally often on every rank, and load the same checkpoint.",
    "count": f"{_SPARSITY}.",
    "payload_bytes": f"{_SPARSITY} or other codecs.",
    "dense_bytes": "The ranks' lists of dense parameters differ: give every rank the same min_numel, include, exclude.",
}
_LIMITED = ("count", "payload_bytes")  # fields that may be less than expected


def pack_header(header: Header, out: np.ndarray) -> None:
    """Write a header into the first 64 bytes of ``out``, (m,) uint8."""
    out[:HEADER_BYTES].view(HEADER)[0] = (MAGIC, VERSION, *header[:-1], _RESERVED, header.absent)


def unpack_header(message: np.ndarray, sender: str) -> Header:
    """Return the header of a message, (m,) uint8, from "rank 3", say. :func:`check_header` compares its fields."""
    origin = f"message from {sender}"
    if message.size < HEADER_BYTES:
        raise WireError(f"{origin}: {message.size} bytes came, a header alone takes {HEADER_BYTES}.")
    magic, version, *fields, reserved, absent = message[:HEADER_BYTES].view(HEADER)[0].item()
    if magic != MAGIC:
        raise WireError(
            f"{origin}: it starts with {magic!r}, expected {MAGIC!r}. These bytes are no message of this package: "
            "does another collective run on the same communicator, or did only some ranks save or load a checkpoint? "
            "All ranks must make the same calls."
        )
    if version != VERSION:
        raise WireError(
            f"{origin}: version {version} came, version {VERSION} was expected. Install the same release of this "
            "package on every host."
        )
    header = Header(*(*fields, absent))
    if header.flags & ~_KNOWN_FLAGS:
        raise WireError(
            f"{origin}: flags {header.flags:#x} came, known bits are {_KNOWN_FLAGS:#x}. The message is damaged, or a "
            "newer release wrote it."
        )
    if reserved != _RESERVED:
        raise WireError(
            f"{origin}: reserved bytes are not 0. The message is damaged, or a newer release wrote it: install the "
            "same release of this package on every host."
        )
    return header


def check_header(header: Header, expected: Header, sender: str) -> None:
    """Compare a header, except for its flags and the fingerprint, with what this rank expects.

    Args:
        header: from :func:`unpack_header`.
        expected: this rank's header, with the largest ``count`` and ``payload_bytes`` that are allowed.
        sender: the rank or node that has sent the message.
    """
    for name, advice in _ADVICE.items():
        came, own = getattr(header, name), getattr(expected, name)
        if came == own or (name in _LIMITED and came < own):
            continue
        limit = "at most " if name in _LIMITED else ""
        raise WireError(
            f"message from {sender}: {name.replace('_', ' ')} {_shown(name, came)} came, {limit}{_shown(name, own)} "
            f"was expected. {advice}"
        )


def _shown(name: str, value: int) -> str:
    if not name.endswith("_codec"):
        return str(value)
    ids = IndexCodecId if name == "index_codec" else ValueCodecId
    return f"{int(value)} ({next((member.name.lower() for member in ids if member == value), 'unknown')})"


# -- sizes ---------------------------------------------------------------------------------------------------------

MIN_MESSAGE_BYTES = 256  # room for the text of an error in every message

INLINE_EXTRA_BYTES = 64 * 1024
INLINE_MAX_BYTES = 1024 * 1024


class Mode(enum.Enum):
    """How a bucket's sparsified tensors are sent in one step."""

    DENSE = "the gradient itself, as a dense sum: before the ramp-up"
    SPARSE = "selected entries: gathered, or added up by owners"
    SUM = "selected entries in a vector of zeros, as a dense sum: fewer bytes at high density"


# The bytes before a part's entries. A part has no flags: the sender's message, which follows, carries them.
PART_HEADER = np.dtype([("magic", "S4"), ("count", "<u4")])
PART_MAGIC = b"DGCp"

# An owner sends this many sums for each entry of an average part. docs/many-ranks.md has the losses with other numbers.
SUMS_PER_ENTRY: float = 8

# The codecs to choose from for an owner's sums, by the codec of entries; the shorter one is used. With two bits the
# loss rises, and with eight it does not fall. "int8" has one scale for each tensor, and "int4" has eight.
SUM_VALUES: dict[str, tuple[str, ...]] = dict.fromkeys(("int2", "int3", "int4"), ("int4", "int8"))

# A part has room for the mean number of entries plus this many standard deviations. One part in 44 overflows. The
# entries that do not fit, less than 0.9 % / sqrt(mean) of all, are sent later.
PART_MARGIN = 2.0


class Dealing:
    """The sizes and codecs of a bucket whose entries are added up by owners; the same on every rank.

    Attributes:
        capacity: the most entries in a part, which one rank sends to one owner.
        part_bytes: bytes of a part.
        ks: the most sums of each tensor that one owner sends to all ranks.
        stripes: the positions of each owner.
        first: for each owner, the codec of the parts that it receives.
        second: the codec of each owner's sums.
        small: the codec of each owner's span of small tensors, in both phases; empty if small tensors are not coded.
        small_bytes: bytes for one span, in a part and in a message.
        small_at: where the small tensors' block begins in a part.
    """

    def __init__(
        self, bucket: Bucket, ks: tuple[int, ...], ranks: int, indices: str, values: str, small: str = "float32"
    ) -> None:
        self.stripes = [Stripes(bucket, rank, ranks) for rank in range(ranks)]
        places = self.stripes[0].sparse_size
        mean = sum(ks) / ranks
        self.capacity = min(places, math.ceil(mean + PART_MARGIN * math.sqrt(mean)))
        self.ks = tuple(min(places, math.ceil(SUMS_PER_ENTRY * k / ranks)) for k in ks)
        self.first = [SparseCodec(each, self.capacity, indices, values) for each in self.stripes]
        most = min(places, sum(self.ks))
        sums = (SparseCodec(self.stripes[0], most, indices, name) for name in SUM_VALUES.get(values, (values,)))
        chosen = min(sums, key=lambda codec: codec.max_bytes).values.name
        self.second = [SparseCodec(each, most, indices, chosen) for each in self.stripes]
        coded = small != "float32" and bucket.small_size
        self.small = [SmallCodec(bucket, small, each.small) for each in self.stripes] if coded else []
        self.small_bytes = max((each.max_bytes for each in self.small), default=0)
        self.small_at = PART_HEADER.itemsize + self.first[0].max_bytes
        self.part_bytes = self.small_at + self.small_bytes


class Traffic(NamedTuple):
    """What passes through a rank in one step.

    Attributes:
        rounds: rounds of rings.
        nbytes: bytes that it receives and sends on.
        entries: received entries that it adds up.
    """

    rounds: int
    nbytes: float
    entries: int


@dataclass
class BucketPlan:
    """How a bucket is sent at one density, and how many bytes this takes.

    The *vector* covers positions ``vector_start`` to ``bucket.size``, which are summed densely. With ``small``, its
    first ``bucket.small_size`` elements are sent coded inside the message. The rest, the *plain* part, is sent inside
    the message (``inline``) if that saves a collective, else by allreduce.

    Attributes:
        mode: how the sparsified tensors are sent.
        density: the schedule's density in this step; None in a dense step.
        ids: numbers of the compressor, the index codec and the value codec in the header.
        ks: the most entries of each sparsified tensor.
        itemsize: bytes of an element of the vector.
        payload_bytes: bytes for selected entries.
        message_bytes: bytes of the message.
        small: the codec of the small tensors, if they are sent coded.
        selection: the codec of selected entries; None if another compressor codes them.
        dealing: how owners add up selected entries; None if they do not. With it, the payload holds an owner's sums.
        way: how the ranks add up sparsified tensors: "dense sum", "gathered" or "owners".
        most_entries: the most entries of a payload.
        is_active: whether an encoder has work: the step is sparsified, and the bucket has a sparsified tensor.
        plain_start: place of the plain part in the vector.
        coded_bytes: bytes of the coded small tensors. They begin the message's dense section, at ``coded_bytes_at``.
        inline_bytes: bytes of the plain part inside the message, at ``inline_bytes_at``.
        dense_bytes: bytes of the dense section.
        allreduces: whether an allreduce of the plain part follows the message.
    """

    mode: Mode
    density: float | None
    ids: tuple[int, int, int]
    ks: tuple[int, ...]
    itemsize: int
    payload_bytes: int
    vector_start: int
    vector_size: int
    inline: bool
    message_bytes: int
    small: SmallCodec | None = None
    selection: SparseCodec | None = None
    dealing: Dealing | None = None

    def __post_init__(self) -> None:
        self.way = "owners" if self.dealing else "gathered" if self.mode is Mode.SPARSE else "dense sum"
        self.most_entries = sum(self.dealing.ks if self.dealing else self.ks)
        self.is_active = self.mode is not Mode.DENSE and bool(self.ks)
        self.plain_start, self.coded_bytes = (self.small.size, self.small.max_bytes) if self.small else (0, 0)
        if self.dealing:
            self.coded_bytes = self.dealing.small_bytes
        plain = self.vector_size - self.plain_start
        self.allreduces = not self.inline
        self.inline_bytes = plain * self.itemsize if self.inline else 0
        self.dense_bytes = self.coded_bytes + self.inline_bytes
        self.coded_bytes_at = HEADER_BYTES + self.payload_bytes
        self.inline_bytes_at = self.coded_bytes_at + self.coded_bytes

    def traffic(self, ranks: int) -> Traffic:
        """Return what passes through a rank in a step."""
        others, entries = ranks - 1, self.vector_size if self.mode is Mode.SUM else ranks * self.most_entries
        rounds, nbytes = others, float(others * self.message_bytes)
        if self.dealing:
            rounds, nbytes, entries = 2 * others, nbytes + others * self.dealing.part_bytes, entries + sum(self.ks)
        if self.allreduces:
            rounds += 2 * others
            nbytes += 2 * others / ranks * (self.vector_size - self.plain_start) * self.itemsize
        return Traffic(rounds, nbytes, entries)

    @property
    def small_codecs(self) -> list[SmallCodec]:
        """The codecs of small tensors: none, one, or one for each owner."""
        return self.dealing.small if self.dealing else [self.small] if self.small else []

    @property
    def codec(self) -> SparseCodec:
        """The codec of selected entries."""
        assert self.selection is not None, "the plan is one of selected entries"
        return self.selection


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
    dealing: Dealing | None = None,
) -> BucketPlan:
    """Decide how ``bucket`` is sent if its sparsified tensors take up to ``payload_bytes`` of payload."""
    itemsize = 8 if bucket.dtype == "float64" else 4
    mode, payload = Mode.DENSE, payload_bytes
    if density is not None:
        # These are the costs in a ring: every message passes every rank; a dense sum moves 2 (P - 1) / P of the vector.
        gathered = (ranks - 1) * (payload + (dealing.small_at if dealing else 0))
        reduced = 2 * (ranks - 1) / ranks * itemsize * bucket.sparse_size
        mode = Mode.SUM if gathered > reduced else Mode.SPARSE
    if mode is not Mode.SPARSE:
        payload, dealing = 0, None
    start = bucket.sparse_size if mode is Mode.SPARSE else 0
    vector = bucket.size - start
    coder = _small_codec(bucket, small, ranks, dealing) if mode is Mode.SPARSE else None
    coded = dealing.small_bytes if dealing else coder.max_bytes if coder else 0
    plain = (vector - (coder.size if coder else 0)) * itemsize
    inline = _inline(plain, plain, ranks)
    message = HEADER_BYTES + payload + coded + (plain if inline else 0)
    message = max(MIN_MESSAGE_BYTES, message)
    if (largest := max(message, ranks * dealing.part_bytes if dealing else 0)) > BYTE_LIMIT:
        raise LayoutError(
            f"bucket {bucket.index} would send a message of {largest} bytes; the limit is 2 GiB: "
            "choose a higher sparsity, or exclude its largest parameter"
        )
    return BucketPlan(
        mode, density, ids, ks, itemsize, payload, start, vector, inline, message, coder, selection, dealing
    )


def _small_codec(bucket: Bucket, name: str, ranks: int, dealing: Dealing | None) -> SmallCodec | None:
    """Return the small tensors' codec; None if there are none, they are sent as float32, or an allreduce is cheaper."""
    if name == "float32" or not bucket.small_size:
        return None
    coder = SmallCodec(bucket, name)
    return coder if dealing or _inline(coder.max_bytes, 4 * bucket.small_size, ranks) else None


def _inline(inside: int, reduced: int, ranks: int) -> bool:
    """Return whether a dense vector should be sent inside the message instead of by an allreduce.

    Inside the message its bytes (``inside``) are sent ``P - 1`` times. An allreduce sends its bytes (``reduced``)
    ``2 (P - 1) / P`` times; in addition each collective has a fixed cost, that of about 64 KiB (50 us at 10 Gbit/s).
    Large vectors are always sent by allreduce, which needs no buffer for P copies.
    """
    extra = (ranks - 1) * inside - 2 * (ranks - 1) / ranks * reduced
    return inside <= INLINE_MAX_BYTES and extra <= INLINE_EXTRA_BYTES


# -- the message ---------------------------------------------------------------------------------------------------

# An error's number in messages is the place of its class in this list.
ERROR_CLASSES: tuple[type[errors.DGCError], ...] = (
    errors.RemoteError,
    errors.LayoutError,
    errors.ConfigError,
    errors.WireError,
    errors.TransportError,
)
_NO_PARAMETER = 2**32 - 1
_JOINED = Flags.JOINED | Flags.BY_TRAINING


class RemoteFailure(Exception):
    """A rank, perhaps this one, has sent an error instead of an ordinary message."""

    def __init__(self, error: errors.DGCError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Incoming:
    """One rank's checked message of one bucket.

    Attributes:
        origin: names the sender and the bucket, for errors.
        joined: the flags JOINED and BY_TRAINING of :class:`Flags`.
        absent: digest of the parameters without a gradient.
    """

    sender: int
    origin: str
    count: int
    nonfinite: bool
    payload: np.ndarray
    inline: np.ndarray
    coded: np.ndarray
    joined: int
    absent: int = 0

    def damaged(self, error: errors.DGCError) -> errors.WireError:
        """Return the error about this message, whose content was refused because of ``error``."""
        return errors.WireError(f"message of {self.origin}: {error}")


class Messages:
    """Writes this rank's message of one bucket, exchanges messages, and checks those of all ranks.

    Attributes:
        payload: (payload_bytes,) uint8 of this rank's message.
        coded: (coded_bytes,) uint8 for the coded small tensors.
    """

    _plan: BucketPlan
    _header: Header  # this step's header; its count is the most entries that a message may hold

    def __init__(self, bucket: int, transport: Transport, memory: Memory | None = None) -> None:
        """Allocate nothing yet; :meth:`start` allocates buffers in ``memory``."""
        self._bucket, self._transport, self._memory = bucket, transport, memory or Memory()
        self._joined = 0
        self._message = self.payload = self.coded = np.empty(0, np.uint8)
        self._gathered = np.empty((0, 0), np.uint8)

    def start(self, plan: BucketPlan, step: int, fingerprint: int) -> None:
        """Begin a message of the plan's size. The fingerprint must be equal on all ranks in this step."""
        self._plan = plan
        self._joined = 0
        compressor, indices, values = plan.ids
        self._header = Header(
            compressor=compressor,
            index_codec=indices,
            value_codec=values,
            step=step,
            fingerprint=fingerprint,
            bucket=self._bucket,
            count=plan.most_entries,
            payload_bytes=plan.payload_bytes,
            dense_bytes=plan.dense_bytes,
            dense_codec=int(plan.small.values.id) if plan.small else 0,
        )
        if self._message.size != plan.message_bytes:
            ranks, size = self._transport.size, plan.message_bytes
            self._message = self._memory.host_array(size, np.uint8)
            self._message.fill(0)
            self._gathered = self._memory.host_array(ranks * size, np.uint8).reshape(ranks, size)
        self.payload = self._message[HEADER_BYTES : plan.coded_bytes_at]
        self.coded = self._message[plan.coded_bytes_at : plan.inline_bytes_at]

    def inline(self, vector: np.ndarray) -> None:
        """Put the plain part of the dense vector into the message."""
        at = self._plan.inline_bytes_at
        self._message[at : at + vector.nbytes] = vector.view(np.uint8)

    def finish(self, *, count: int, nonfinite: bool, joined: int = 0, absent: int = 0) -> None:
        """Write the header of an ordinary message. ``joined`` is 0, or the flags of a rank without data."""
        self._joined = joined
        flags = joined | Flags.NONFINITE * nonfinite
        pack_header(self._header._replace(count=count, flags=flags, absent=absent), self._message)

    def write_error(self, error: errors.DGCError, parameter: int | None) -> None:
        """Write a message that carries an error, whose text replaces the payload."""
        text = str(error).encode()[: self._message.size - HEADER_BYTES - 1]
        self._message[HEADER_BYTES:] = 0
        self._message[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        concerned = _NO_PARAMETER if parameter is None else parameter
        code = error_code(error)
        header = self._header._replace(count=0, flags=Flags.ERROR, error_code=code, error_parameter=concerned)
        pack_header(header, self._message)

    def exchange(self) -> None:
        """Allgather the messages, blocking."""
        self._transport.allgather(self._message, self._gathered)

    def receive(self) -> list[Incoming]:
        """Check the messages of all ranks, and return them in rank order."""
        plan, expected, label = self._plan, self._header, self._transport.label
        headers, joins = [], {0}
        # Look for errors first: a rank may have failed before it knew this step's options for its header.
        for sender, data in enumerate(self._gathered):
            header = unpack_header(data, label(sender))
            headers.append(header)
            joins.add(header.flags & _JOINED)
            if header.flags & Flags.ERROR:
                text = bytes(self._gathered[sender, HEADER_BYTES:]).split(b"\0", 1)[0].decode(errors="replace")
                code = header.error_code if header.error_code < len(ERROR_CLASSES) else 0
                raise RemoteFailure(ERROR_CLASSES[code](f"{label(sender)} failed in step {header.step}: {text}"))
        if len(joins) > 2:
            raise errors.ConfigError("the ranks gave join() different values of divide_by=: give all the same value")
        incoming = []
        for sender, (header, data) in enumerate(zip(headers, self._gathered, strict=True)):
            who, joined = label(sender), header.flags & _JOINED
            if joined or self._joined:  # a rank without data does not follow the schedules
                header = header._replace(fingerprint=expected.fingerprint)
            if header.fingerprint != expected.fingerprint:
                raise errors.ConfigError(
                    f"{who} and {label(self._transport.rank)} disagree in step {expected.step} about the learning "
                    "rate, momentum, Nesterov, weight decay, frozen variables or the layout: schedulers and loaded "
                    "checkpoints must set the same values on every rank (load a checkpoint on all ranks, or broadcast "
                    "the optimizer's state; decide about a learning rate from metrics that are averaged over the ranks)"
                )
            check_header(header, expected, who)
            coded, at = plan.coded_bytes_at, plan.inline_bytes_at
            incoming.append(
                Incoming(
                    sender=sender,
                    origin=f"{who} for bucket {self._bucket}",
                    count=header.count,
                    nonfinite=bool(header.flags & Flags.NONFINITE),
                    payload=data[HEADER_BYTES:coded],
                    inline=data[at : at + plan.inline_bytes],
                    coded=data[coded:at],
                    joined=joined,
                    absent=header.absent,
                )
            )
        return incoming


def error_code(error: errors.DGCError) -> int:
    """Return the number of an error's class in :data:`ERROR_CLASSES`."""
    return next((i for i, c in enumerate(ERROR_CLASSES) if isinstance(error, c)), 0)
