"""The 64 bytes at the start of every message, and the checks that a receiver makes before it reads on.

A receiver knows from its own configuration what each field must be. A difference is a :class:`WireError` that names
the sender, the field, both values and the usual cause; no block is read before all fields agree.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

import numpy as np

from dgc.core.codecs import IndexCodecId, ValueCodecId
from dgc.errors import WireError

MAGIC = b"DGCm"
VERSION = 1

LAYOUT = np.dtype(
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
"""The bytes. Every field lies on a multiple of its own size."""
HEADER_BYTES = LAYOUT.itemsize
"""64. It never changes within a version, and is a multiple of the block alignment."""
assert HEADER_BYTES == 64
_RESERVED = bytes(LAYOUT["reserved"].itemsize)


class Flags(IntFlag):
    """What a message says about itself beside its content. All other bits must be 0."""

    NONFINITE = 1
    """The sender's gradient had non-finite entries in this bucket: the step is refused on every rank."""
    ERROR = 2
    """The sender failed: ``error_code`` and ``error_parameter`` say how, and there are no entries."""
    JOINED = 4
    """The sender has run out of data: its gradients are 0, and its fingerprint is not compared."""
    BY_TRAINING = 8
    """With ``JOINED``: from the next step on, averages are over the ranks that have not joined."""


_KNOWN_FLAGS = sum(Flags)


class Header(NamedTuple):
    """The fields of one message's header that differ between messages, in the order of :data:`LAYOUT`."""

    compressor: int
    """Number of the algorithm."""
    index_codec: int
    """:class:`IndexCodecId`."""
    value_codec: int
    """:class:`ValueCodecId`."""
    step: int
    """The sender's step."""
    fingerprint: int
    """Hash of the layout, momentum, Nesterov, weight decay, gain and learning rates, equal on all ranks."""
    bucket: int
    """The bucket's number in the layout."""
    count: int  # type: ignore[assignment]  # hides the method of tuples
    """Entries sent, k."""
    payload_bytes: int
    """Bytes of the payload: index block, value block, and the zeros that fill up its fixed size."""
    dense_bytes: int
    """Bytes of the dense section that follows the payload; 0 when there is none."""
    flags: int = 0
    """:class:`Flags`."""
    error_code: int = 0
    """0, or which error the sender met (with ``Flags.ERROR``)."""
    error_parameter: int = 0
    """The number of the parameter that the error is about."""
    dense_codec: int = 0
    """:class:`ValueCodecId` of the small tensors at the start of the dense section; 0 when there are none."""
    absent: int = 0
    """Digest of which parameters of the bucket have no gradient on the sender; 0 when all have one. It may differ."""


_TOO_LARGE = tuple(1 << 8 * LAYOUT[name].itemsize for name in Header._fields)

_SPARSITY = "The message is damaged, or its sender uses another sparsity"
_ADVICE = {
    "compressor": "Give every rank the same compression=.",
    "index_codec": "Give every rank the same indices= and the same sparsity.",
    "value_codec": "Give every rank the same values=.",
    "dense_codec": "Give every rank the same small= and the same sparsity.",
    "bucket": "The ranks exchange buckets in different orders: build the model and the compressor alike on every rank.",
    "step": "The ranks are out of step: call step() equally often on every rank, and load the same checkpoint.",
    "count": f"{_SPARSITY}.",
    "payload_bytes": f"{_SPARSITY} or other codecs.",
    "dense_bytes": "The ranks' lists of dense parameters differ: give every rank the same min_numel, include, exclude.",
}
"""What to do about a difference, the most telling one first."""
_LIMITED = ("count", "payload_bytes")


def pack_header(header: Header, out: np.ndarray) -> None:
    """Write a header into the first 64 bytes of ``out``, (m,) uint8."""
    if out.size < HEADER_BYTES:
        raise WireError(f"a header takes {HEADER_BYTES} bytes, the message has {out.size}.")
    if header.flags & ~_KNOWN_FLAGS:
        raise WireError(f"header: flags are {header.flags:#x}, known bits are {_KNOWN_FLAGS:#x}.")
    for name, value, limit in zip(Header._fields, header, _TOO_LARGE, strict=True):
        if not 0 <= value < limit:
            raise WireError(f"header: {name} is {value}, it must be in 0..{limit - 1}.")
    out[:HEADER_BYTES].view(LAYOUT)[0] = (MAGIC, VERSION, *header[:-1], _RESERVED, header.absent)


def unpack_header(message: np.ndarray, sender: int | None = None) -> Header:
    """Read the header of a message, (m,) uint8; its fields are compared by :func:`check_header`."""
    origin = "message" if sender is None else f"message from rank {sender}"
    if message.size < HEADER_BYTES:
        raise WireError(f"{origin}: {message.size} bytes came, a header alone takes {HEADER_BYTES}.")
    magic, version, *fields, reserved, absent = message[:HEADER_BYTES].view(LAYOUT)[0].item()
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


def check_header(header: Header, expected: Header, sender: int | str) -> None:
    """Compare a header, but for its flags and the fingerprint, with what this rank expects.

    Args:
        header: from :func:`unpack_header`.
        expected: of this rank; ``count`` and ``payload_bytes`` are the most that is allowed.
        sender: the rank the message came from.
    """
    for name, advice in _ADVICE.items():
        came, own = getattr(header, name), getattr(expected, name)
        if came == own or (name in _LIMITED and came < own):
            continue
        origin = sender if isinstance(sender, str) else f"rank {sender}"
        limit = "at most " if name in _LIMITED else ""
        raise WireError(
            f"message from {origin}: {name.replace('_', ' ')} {_shown(name, came)} came, {limit}{_shown(name, own)} "
            f"was expected. {advice}"
        )


def _shown(name: str, value: int) -> str:
    if not name.endswith("_codec"):
        return str(value)
    ids = IndexCodecId if name == "index_codec" else ValueCodecId
    return f"{int(value)} ({next((member.name.lower() for member in ids if member == value), 'unknown')})"
