"""The 64 bytes at the start of every message, and the checks that a receiver makes before it reads on.

A receiver knows from its own configuration what each field must be. A difference is a :class:`WireError` that names
the sender, the field, both values and the usual cause; no block is read before all fields agree.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from dgc.core.wire.codecs.base import IndexCodecId, ValueCodecId
from dgc.errors import WireError

HEADER_BYTES = 64
"""Length of a header. It never changes within a version, and is a multiple of the block alignment."""
MAGIC = b"DGCm"
VERSION = 1

# magic, version, compressor, index codec, value codec | step, fingerprint | bucket, count, payload, dense
# | flags, error code, error parameter | dense codec, reserved. Every field lies on a multiple of its own size.
_LAYOUT = struct.Struct("<4s4B2Q4I2HIB7sQ")
assert _LAYOUT.size == HEADER_BYTES


class Flags(IntFlag):
    """What a message says about itself beside its content. All other bits must be 0."""

    NONFINITE = 1
    """The sender's gradient had non-finite entries in this bucket: the step is refused on every rank."""
    ERROR = 2
    """The sender failed: ``error_code`` and ``error_parameter`` say how, and there are no entries."""


_KNOWN_FLAGS = int(Flags.NONFINITE | Flags.ERROR)


@dataclass(frozen=True, slots=True)
class Header:
    """One message's header. Unsigned integers of the sizes given."""

    compressor: int
    """u8: number of the algorithm."""
    index_codec: int
    """u8: :class:`IndexCodecId`."""
    value_codec: int
    """u8: :class:`ValueCodecId`."""
    flags: int
    """u16: :class:`Flags`."""
    step: int
    """u64: the sender's step."""
    bucket: int
    """u32: the bucket's number in the layout."""
    fingerprint: int
    """u64: hash of layout and configuration, equal on all ranks."""
    count: int
    """u32: entries sent, k."""
    payload_bytes: int
    """u32: bytes of the payload: index block, value block, and the zeros that fill up its fixed size."""
    dense_bytes: int
    """u32: bytes of the dense section that follows the payload; 0 when there is none."""
    error_code: int = 0
    """u16: 0, or which error the sender met (with ``Flags.ERROR``)."""
    error_parameter: int = 0
    """u32: the number of the parameter that the error is about."""
    dense_codec: int = 0
    """u8: :class:`ValueCodecId` of the small tensors at the start of the dense section; 0 when there are none."""


_LIMITS = {
    "compressor": 8,
    "index_codec": 8,
    "value_codec": 8,
    "flags": 16,
    "step": 64,
    "bucket": 32,
    "fingerprint": 64,
    "count": 32,
    "payload_bytes": 32,
    "dense_bytes": 32,
    "error_code": 16,
    "error_parameter": 32,
    "dense_codec": 8,
}

_ADVICE = {
    "compressor": "Give every rank the same compression=.",
    "index codec": "Give every rank the same indices= and the same sparsity.",
    "value codec": "Give every rank the same values=.",
    "fingerprint": "The ranks' parameters or options differ: build the model and the compressor alike on every rank.",
    "bucket": "The ranks exchange buckets in different orders: build the model and the compressor alike on every rank.",
    "step": "The ranks are out of step: call step() equally often on every rank, and load the same checkpoint.",
    "count": "The message is damaged, or its sender uses another sparsity.",
    "payload bytes": "The message is damaged, or its sender uses another sparsity or other codecs.",
    "dense codec": "Give every rank the same small= and the same sparsity.",
    "dense bytes": "The ranks' lists of dense parameters differ: give every rank the same min_numel, include, exclude.",
}


def pack_header(header: Header, out: np.ndarray) -> None:
    """Write a header into the first 64 bytes of ``out``.

    Args:
        header: what to write.
        out: (m,) uint8, contiguous, m >= 64.

    Raises:
        WireError: ``out`` is too short, a field does not fit its bytes, or an unknown flag is set.
    """
    if out.size < HEADER_BYTES:
        raise WireError(f"a header takes {HEADER_BYTES} bytes, the message has {out.size}.")
    if header.flags & ~_KNOWN_FLAGS:
        raise WireError(f"header: flags are {header.flags:#x}, known bits are {_KNOWN_FLAGS:#x}.")
    try:
        _LAYOUT.pack_into(
            out.data,
            0,
            MAGIC,
            VERSION,
            header.compressor,
            header.index_codec,
            header.value_codec,
            header.step,
            header.fingerprint,
            header.bucket,
            header.count,
            header.payload_bytes,
            header.dense_bytes,
            header.flags,
            header.error_code,
            header.error_parameter,
            header.dense_codec,
            bytes(7),
            0,
        )
    except struct.error as error:
        for name, bits in _LIMITS.items():
            value = getattr(header, name)
            if not 0 <= value < 1 << bits:
                raise WireError(f"header: {name} is {value}, it must be in 0..{(1 << bits) - 1}.") from error
        raise WireError(f"header: {error}.") from error


def unpack_header(message: np.ndarray, sender: int | None = None) -> Header:
    """Read the header of a message.

    Args:
        message: (m,) uint8, contiguous, at least the first 64 bytes.
        sender: the rank it came from, for the error message.

    Returns:
        The header; its fields are not compared with anything yet, see :func:`check_header`.

    Raises:
        WireError: too short, wrong magic, another version, an unknown flag, or reserved bytes that are not 0.
    """
    origin = "message" if sender is None else f"message from rank {sender}"
    if message.size < HEADER_BYTES:
        raise WireError(f"{origin}: {message.size} bytes came, a header alone takes {HEADER_BYTES}.")
    (
        magic,
        version,
        compressor,
        index_codec,
        value_codec,
        step,
        fingerprint,
        bucket,
        count,
        payload_bytes,
        dense_bytes,
        flags,
        error_code,
        error_parameter,
        dense_codec,
        reserved,
        reserved_too,
    ) = _LAYOUT.unpack_from(message.data, 0)
    if magic != MAGIC:
        raise WireError(
            f"{origin}: it starts with {magic!r}, expected {MAGIC!r}. These bytes are no message of this package: "
            "is another collective running on the same communicator?"
        )
    if version != VERSION:
        raise WireError(
            f"{origin}: version {version} came, version {VERSION} was expected. Install the same release of this "
            "package on every host."
        )
    if flags & ~_KNOWN_FLAGS:
        raise WireError(
            f"{origin}: flags {flags:#x} came, known bits are {_KNOWN_FLAGS:#x}. The message is damaged, or a "
            "newer release wrote it."
        )
    if any(reserved) or reserved_too:
        raise WireError(
            f"{origin}: reserved bytes are not 0. The message is damaged, or a newer release wrote it: install the "
            "same release of this package on every host."
        )
    return Header(
        compressor=compressor,
        index_codec=index_codec,
        value_codec=value_codec,
        flags=flags,
        step=step,
        bucket=bucket,
        fingerprint=fingerprint,
        count=count,
        payload_bytes=payload_bytes,
        dense_bytes=dense_bytes,
        error_code=error_code,
        error_parameter=error_parameter,
        dense_codec=dense_codec,
    )


def check_header(
    header: Header,
    *,
    compressor: int,
    index_codec: int,
    value_codec: int,
    step: int,
    bucket: int,
    fingerprint: int,
    max_count: int,
    max_payload: int,
    dense_bytes: int,
    sender: int | str,
    dense_codec: int = 0,
) -> None:
    """Compare a header with what this rank expects.

    Flags are the caller's business: a message with ``Flags.ERROR`` or ``Flags.NONFINITE`` passes.

    Args:
        header: from :func:`unpack_header`.
        compressor: the algorithm's number.
        index_codec: an :class:`IndexCodecId`.
        value_codec: a :class:`ValueCodecId`.
        step: this rank's step.
        bucket: the bucket's number.
        fingerprint: hash of this rank's layout and configuration.
        max_count: the largest number of entries allowed at this density.
        max_payload: the bytes reserved for the payload.
        dense_bytes: bytes of the dense section.
        sender: the rank the message came from.
        dense_codec: a :class:`ValueCodecId`, or 0.

    Raises:
        WireError: the first field that differs, the most telling one first.
    """
    if header.compressor != compressor:
        raise _mismatch(sender, "compressor", str(header.compressor), str(compressor))
    if header.index_codec != index_codec:
        came, expected = _codec(IndexCodecId, header.index_codec), _codec(IndexCodecId, index_codec)
        raise _mismatch(sender, "index codec", came, expected)
    if header.value_codec != value_codec:
        came, expected = _codec(ValueCodecId, header.value_codec), _codec(ValueCodecId, value_codec)
        raise _mismatch(sender, "value codec", came, expected)
    if header.dense_codec != dense_codec:
        came, expected = _codec(ValueCodecId, header.dense_codec), _codec(ValueCodecId, dense_codec)
        raise _mismatch(sender, "dense codec", came, expected)
    if header.fingerprint != fingerprint:
        raise _mismatch(sender, "fingerprint", f"{header.fingerprint:016x}", f"{fingerprint:016x}")
    if header.bucket != bucket:
        raise _mismatch(sender, "bucket", str(header.bucket), str(bucket))
    if header.step != step:
        raise _mismatch(sender, "step", str(header.step), str(step))
    if header.count > max_count:
        raise _mismatch(sender, "count", str(header.count), f"at most {max_count}")
    if header.payload_bytes > max_payload:
        raise _mismatch(sender, "payload bytes", str(header.payload_bytes), f"at most {max_payload}")
    if header.dense_bytes != dense_bytes:
        raise _mismatch(sender, "dense bytes", str(header.dense_bytes), str(dense_bytes))


def _mismatch(sender: int | str, field: str, came: str, expected: str) -> WireError:
    origin = sender if isinstance(sender, str) else f"rank {sender}"
    return WireError(f"message from {origin}: {field} {came} came, {expected} was expected. {_ADVICE[field]}")


def _codec(ids: type[IndexCodecId] | type[ValueCodecId], number: int) -> str:
    names = {int(member): member.name.lower() for member in ids}
    return f"{int(number)} ({names.get(number, 'unknown')})"
