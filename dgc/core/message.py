"""A bucket's message: header, sparse payload, and the dense tensors when they are in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc import errors
from dgc.core.header import HEADER_BYTES, Flags, Header, check_header, pack_header, unpack_header
from dgc.core.kernels.base import HostMemory, Memory
from dgc.core.plan import BucketPlan
from dgc.core.transport import Transport

ERROR_CLASSES: tuple[type[errors.DGCError], ...] = (
    errors.RemoteError,
    errors.LayoutError,
    errors.ConfigError,
    errors.WireError,
    errors.TransportError,
)
"""By their number in messages."""
_NO_PARAMETER = 2**32 - 1
_JOINED = Flags.JOINED | Flags.BY_TRAINING


class RemoteFailure(Exception):
    """A rank, another one or this one, sent an error instead of a message."""

    def __init__(self, error: errors.DGCError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Incoming:
    """One rank's message of one bucket, checked. ``origin`` names both, for errors."""

    sender: int
    origin: str
    count: int
    nonfinite: bool
    payload: np.ndarray
    inline: np.ndarray
    coded: np.ndarray
    joined: int
    """Of :class:`Flags`: JOINED, BY_TRAINING."""
    absent: int = 0
    """Digest of the parameters without a gradient."""

    def damaged(self, error: errors.DGCError) -> errors.WireError:
        """The error about this message, by what its content was refused for."""
        return errors.WireError(f"message of {self.origin}: {error}")


class Sender:
    """Writes this rank's messages of one bucket, exchanges them, and checks those of all ranks.

    Attributes:
        payload: where the sparse payload goes, (payload_bytes,) uint8.
        coded: where the coded small tensors go, (coded_bytes,) uint8.
    """

    _plan: BucketPlan
    _header: Header
    """Of an ordinary message of this step with as many entries as may be."""

    def __init__(self, bucket: int, transport: Transport, memory: Memory | None = None) -> None:
        """Allocate nothing yet; buffers, of ``memory``, follow the plan given to :meth:`start`."""
        self._memory = memory or HostMemory()
        self._bucket = bucket
        self._transport = transport
        self._joined = 0
        self._message = self.payload = self.coded = np.empty(0, np.uint8)
        self._gathered = np.empty((0, 0), np.uint8)

    def start(self, plan: BucketPlan, step: int, fingerprint: int) -> None:
        """Begin a message of the plan's size; all ranks must have the same fingerprint in this step."""
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
            count=sum(plan.ks),
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
        """Write the header of an ordinary message; ``joined`` is 0, or the flags of a rank that has run out of data."""
        self._joined = joined
        flags = joined | Flags.NONFINITE * nonfinite
        pack_header(self._header._replace(count=count, flags=flags, absent=absent), self._message)

    def write_error(self, error: errors.DGCError, parameter: int | None) -> None:
        """Write a message that carries an error; its text takes the place of the payload."""
        text = str(error).encode()[: self._message.size - HEADER_BYTES - 1]
        self._message[HEADER_BYTES:] = 0
        self._message[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        concerned = _NO_PARAMETER if parameter is None else parameter
        code = error_code(error)
        pack_header(
            self._header._replace(count=0, flags=Flags.ERROR, error_code=code, error_parameter=concerned), self._message
        )

    def exchange(self) -> None:
        """Allgather the messages, blocking."""
        self._transport.allgather(self._message, self._gathered)

    def receive(self) -> list[Incoming]:
        """Check and take apart all ranks' messages, in rank order."""
        plan, expected, label = self._plan, self._header, self._transport.label
        headers, joins = [], {0}
        # A rank that gave up may have done so before it knew this step's options: its error is what counts.
        for sender, data in enumerate(self._gathered):
            header = unpack_header(data, sender)
            headers.append(header)
            joins.add(header.flags & _JOINED)
            if header.flags & Flags.ERROR:
                text = bytes(self._gathered[sender, HEADER_BYTES:]).split(b"\0", 1)[0].decode(errors="replace")
                code = header.error_code if header.error_code < len(ERROR_CLASSES) else 0
                raise RemoteFailure(ERROR_CLASSES[code](f"{label(sender)} failed in step {header.step}: {text}"))
        if len(joins) > 2:
            raise errors.ConfigError("the ranks gave join() different values of divide_by=: give all of them the same")
        incoming = []
        for sender, (header, data) in enumerate(zip(headers, self._gathered, strict=True)):
            who, joined = label(sender), header.flags & _JOINED
            if joined or self._joined:  # a rank without data does not follow schedules
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
            message = Incoming(
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
            incoming.append(message)
        return incoming


def error_code(error: errors.DGCError) -> int:
    """The number of an error's class among :data:`ERROR_CLASSES`."""
    return next((i for i, c in enumerate(ERROR_CLASSES) if isinstance(error, c)), 0)
