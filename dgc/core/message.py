"""A bucket's message: its header, the sizes of its parts, and how it is written, exchanged and checked.

A receiver knows the expected value of each field of the header from its own configuration. A difference raises a
:class:`WireError` that names the sender, the field, both values and the usual cause. A receiver reads the rest of a
message only if all fields agree.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dgc import errors
from dgc.core.codecs import IndexCodecId, ValueCodecId
from dgc.core.collectives import Transport
from dgc.core.kernels.base import Memory
from dgc.errors import WireError

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
    ENDED = 16  # with JOINED: the sender's fit() has ended
    EDITED = 32  # with step-ahead error feedback: the sender's parameters were changed outside of step()


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


# -- the message ---------------------------------------------------------------------------------------------------

MIN_MESSAGE_BYTES = 256  # room for the text of an error in every message


class Form(NamedTuple):
    """The sizes of a message, and what its header says in every step; the same on all ranks.

    After the header come the payload, and a dense section of two parts.

    Attributes:
        ids: numbers of the compressor, the index codec and the value codec.
        count: the most entries of the payload.
        payload_bytes: bytes for selected entries, or for sums of them.
        coded_bytes: bytes of the coded small tensors.
        inline_bytes: bytes of the dense vector, if it is sent inside the message.
        dense_codec: number of the small tensors' codec.
    """

    ids: tuple[int, int, int]
    count: int = 0  # type: ignore[assignment]  # hides the method of tuples
    payload_bytes: int = 0
    coded_bytes: int = 0
    inline_bytes: int = 0
    dense_codec: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return max(MIN_MESSAGE_BYTES, HEADER_BYTES + self.payload_bytes + self.coded_bytes + self.inline_bytes)

    def parts(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return views of a message's payload, coded small tensors and dense vector."""
        coded = HEADER_BYTES + self.payload_bytes
        inline = coded + self.coded_bytes
        return message[HEADER_BYTES:coded], message[coded:inline], message[inline : inline + self.inline_bytes]


# An error's number in messages is the place of its class in this list.
ERROR_CLASSES: tuple[type[errors.DGCError], ...] = (
    errors.RemoteError,
    errors.LayoutError,
    errors.ConfigError,
    errors.WireError,
    errors.TransportError,
)
_NO_PARAMETER = 2**32 - 1
_JOINED = Flags.JOINED | Flags.BY_TRAINING | Flags.ENDED


class Disagreement(errors.ConfigError):
    """The options of a step differ between ranks. No rank has joined, so all ranks raise this error."""


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
        joined: the flags JOINED, BY_TRAINING and ENDED of :class:`Flags`.
        edited: whether the flag EDITED is set.
        absent: digest of the parameters without a gradient.
    """

    sender: int
    origin: str
    count: int
    nonfinite: bool
    payload: np.ndarray
    coded: np.ndarray
    inline: np.ndarray
    joined: int
    absent: int = 0
    edited: bool = False

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Return a context in which this message is read; an error about its content names the sender."""
        try:
            yield
        except (WireError, errors.LayoutError) as error:
            raise WireError(f"message of {self.origin}: {error}") from error


class Messages:
    """Writes this rank's message of one bucket, exchanges messages, and checks those of all ranks.

    Attributes:
        payload: (payload_bytes,) uint8 of this rank's message.
        coded: (coded_bytes,) uint8 for the coded small tensors.
        inline: (inline_bytes,) uint8 for the dense vector.
    """

    _header: Header  # this step's header; its count is the most entries that a message may hold

    def __init__(self, form: Form, bucket: int, transport: Transport, memory: Memory | None = None) -> None:
        """Allocate buffers in ``memory``."""
        self._form, self._bucket, self._transport, self._joined = form, bucket, transport, 0
        ranks, memory = transport.size, memory or Memory()
        self._message = memory.host_array(form.nbytes, np.uint8)
        self._message.fill(0)
        self._gathered = memory.host_array(ranks * form.nbytes, np.uint8).reshape(ranks, form.nbytes)
        self.payload, self.coded, self.inline = form.parts(self._message)

    def start(self, step: int, fingerprint: int) -> None:
        """Begin a message. The fingerprint must be equal on all ranks in this step."""
        form, (compressor, indices, values) = self._form, self._form.ids
        self._joined = 0
        self._header = Header(
            compressor=compressor,
            index_codec=indices,
            value_codec=values,
            step=step,
            fingerprint=fingerprint,
            bucket=self._bucket,
            count=form.count,
            payload_bytes=form.payload_bytes,
            dense_bytes=form.coded_bytes + form.inline_bytes,
            dense_codec=form.dense_codec,
        )

    def finish(self, *, count: int, nonfinite: bool, joined: int = 0, absent: int = 0) -> None:
        """Write the header of an ordinary message. ``joined`` has the flags of a rank without data, and EDITED."""
        self._joined = joined & _JOINED
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

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have sent the same bytes."""
        return bool((self._gathered == self._gathered[0]).all())

    def receive(self) -> list[Incoming]:
        """Check the messages of all ranks, and return them in rank order."""
        expected, label = self._header, self._transport.label
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
        # A rank without data does not follow the schedules. It only checks that the others agree.
        training = [header for header in headers if not header.flags & _JOINED]
        fingerprint = training[0].fingerprint if self._joined and training else expected.fingerprint
        incoming = []
        for sender, (header, data) in enumerate(zip(headers, self._gathered, strict=True)):
            who, joined = label(sender), header.flags & _JOINED
            if not joined and header.fingerprint != fingerprint:
                kind = Disagreement if joins == {0} else errors.ConfigError
                other = label(headers.index(training[0]) if self._joined else self._transport.rank)
                raise kind(
                    f"{who} and {other} disagree in step {expected.step} about the learning "
                    "rate, momentum, Nesterov, weight decay, frozen variables or the layout: schedulers and loaded "
                    "checkpoints must set the same values on every rank (load a checkpoint on all ranks, or broadcast "
                    "the optimizer's state; decide about a learning rate from metrics that are averaged over the ranks)"
                )
            check_header(header, expected, who)
            payload, coded, inline = self._form.parts(data)
            incoming.append(
                Incoming(
                    sender=sender,
                    origin=f"{who} for bucket {self._bucket}",
                    count=header.count,
                    nonfinite=bool(header.flags & Flags.NONFINITE),
                    payload=payload,
                    coded=coded,
                    inline=inline,
                    joined=joined,
                    absent=header.absent,
                    edited=bool(header.flags & Flags.EDITED),
                )
            )
        return incoming


def error_code(error: errors.DGCError) -> int:
    """Return the number of an error's class in :data:`ERROR_CLASSES`."""
    return next((i for i, c in enumerate(ERROR_CLASSES) if isinstance(error, c)), 0)
