"""A bucket's message: header, sparse payload, and the dense tensors when they travel along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dgc import errors
from dgc.core.kernels.base import HostMemory, Memory
from dgc.core.transport import Transport
from dgc.core.wire.header import HEADER_BYTES, Flags, Header, check_header, pack_header, unpack_header
from dgc.core.wire.plan import BucketPlan

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


@dataclass(slots=True)
class Incoming:
    """One rank's message of one bucket, checked. ``who`` is its sender as a user reads it."""

    sender: int
    who: str
    count: int
    nonfinite: bool
    payload: np.ndarray
    inline: np.ndarray
    coded: np.ndarray
    error: errors.DGCError | None = None
    joined: int = 0
    """Of :class:`Flags`: JOINED, BY_TRAINING."""


@contextmanager
def blaming(who: str, bucket: int) -> Iterator[None]:
    """Say whose message of which bucket is damaged.

    Raises:
        WireError: for a WireError or LayoutError inside.
    """
    try:
        yield
    except (errors.WireError, errors.LayoutError) as error:
        raise errors.WireError(f"message of {who} for bucket {bucket}: {error}") from error


class Sender:
    """Writes this rank's messages of one bucket, exchanges them, and checks those of all ranks."""

    def __init__(self, bucket: int, transport: Transport, memory: Memory | None = None) -> None:
        """Allocate nothing yet; buffers, of ``memory``, follow the plan given to :meth:`start`."""
        self._memory = memory or HostMemory()
        self._fingerprint = self._joined = 0
        self._bucket = bucket
        self._transport = transport
        self._plan: BucketPlan | None = None
        self._message = np.empty(0, np.uint8)
        self._gathered = np.empty((0, 0), np.uint8)

    def start(self, plan: BucketPlan, fingerprint: int) -> None:
        """Begin a message of the plan's size; all ranks must have the same fingerprint in this step."""
        self._plan = plan
        self._fingerprint = fingerprint
        if self._message.size != plan.message_bytes:
            ranks, size = self._transport.size, plan.message_bytes
            self._message = self._memory.host_array(size, np.uint8)
            self._message.fill(0)
            self._gathered = self._memory.host_array(ranks * size, np.uint8).reshape(ranks, size)

    @property
    def payload(self) -> np.ndarray:
        """Where the sparse payload goes, (payload_bytes,) uint8."""
        return self._message[HEADER_BYTES : HEADER_BYTES + self._required_plan.payload_bytes]

    @property
    def coded(self) -> np.ndarray:
        """Where the coded small tensors go, (coded_bytes,) uint8."""
        at = self._required_plan.coded_bytes_at
        return self._message[at : at + self._required_plan.coded_bytes]

    def inline(self, vector: np.ndarray) -> None:
        """Put the plain part of the dense vector into the message."""
        at = self._required_plan.inline_bytes_at
        self._message[at : at + vector.nbytes] = vector.view(np.uint8)

    def finish(self, step: int, *, count: int, nonfinite: bool, joined: int = 0) -> None:
        """Write the header of an ordinary message; ``joined`` is 0, or the flags of a rank that has run out of data."""
        self._joined = joined
        pack_header(self._header(step, joined | Flags.NONFINITE * nonfinite, count=count), self._message)

    def write_error(self, step: int, error: errors.DGCError, parameter: int | None) -> None:
        """Write a message that carries an error; its text takes the place of the payload."""
        code = error_code(error)
        text = str(error).encode()[: self._message.size - HEADER_BYTES - 1]
        self._message[HEADER_BYTES:] = 0
        self._message[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        concerned = _NO_PARAMETER if parameter is None else parameter
        header = self._header(step, Flags.ERROR, error_code=code, error_parameter=concerned)
        pack_header(header, self._message)

    def exchange(self) -> None:
        """Allgather the messages, blocking."""
        self._transport.allgather(self._message, self._gathered)

    def receive(self, step: int) -> list[Incoming]:
        """Check and take apart all ranks' messages, in rank order; only the errors, if a rank sent one.

        Raises:
            ConfigError: the ranks have different options in this step.
            WireError: a header does not fit this bucket, step, layout or codec.
        """
        plan = self._required_plan
        expected = self._header(step, count=sum(plan.ks))
        headers = [unpack_header(data) for data in self._gathered]
        # A rank that gave up may have done so before it knew this step's options: its error is what counts.
        failed = [i for i, header in enumerate(headers) if header.flags & Flags.ERROR]
        if failed:
            return [_failure(headers[i], self._gathered[i], i, self._transport.label(i)) for i in failed]
        if len({header.flags & _JOINED for header in headers} - {0}) > 1:
            raise errors.ConfigError("the ranks gave join() different values of divide_by=: give all of them the same")
        incoming = []
        for sender, (header, data) in enumerate(zip(headers, self._gathered, strict=True)):
            who, own = self._transport.label(sender), self._transport.label(self._transport.rank)
            joined = header.flags & _JOINED
            if joined or self._joined:  # a rank without data does not follow schedules
                header = header._replace(fingerprint=self._fingerprint)
            if header.fingerprint != self._fingerprint:
                raise errors.ConfigError(
                    f"{who} and {own} disagree in step {step} about the learning rate, momentum, Nesterov, weight "
                    "decay or the layout: schedulers and loaded checkpoints must set the same values on every rank "
                    "(load a checkpoint on all ranks, or broadcast the optimizer's state; decide about a learning rate "
                    "from metrics that are averaged over the ranks)"
                )
            check_header(header, expected, who)
            coded, at = plan.coded_bytes_at, plan.inline_bytes_at
            message = Incoming(
                sender=sender,
                who=who,
                count=header.count,
                nonfinite=bool(header.flags & Flags.NONFINITE),
                payload=data[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes],
                inline=data[at : at + plan.inline_bytes],
                coded=data[coded:at],
                joined=joined,
            )
            incoming.append(message)
        return incoming

    @property
    def _required_plan(self) -> BucketPlan:
        assert self._plan is not None, "start() comes first"
        return self._plan

    def _header(
        self, step: int, flags: int = 0, *, count: int = 0, error_code: int = 0, error_parameter: int = 0
    ) -> Header:
        plan = self._required_plan
        return Header(
            compressor=plan.codec.compressor_id,
            index_codec=plan.codec.indices.id,
            value_codec=plan.codec.values.id,
            step=step,
            fingerprint=self._fingerprint,
            bucket=self._bucket,
            count=count,
            payload_bytes=plan.payload_bytes,
            dense_bytes=plan.dense_bytes,
            flags=flags,
            error_code=error_code,
            error_parameter=error_parameter,
            dense_codec=int(plan.small.values.id) if plan.small else 0,
        )


def error_code(error: errors.DGCError) -> int:
    """The number of an error's class among :data:`ERROR_CLASSES`."""
    return next((i for i, c in enumerate(ERROR_CLASSES) if isinstance(error, c)), 0)


def _failure(header: Header, data: np.ndarray, sender: int, who: str) -> Incoming:
    text = bytes(data[HEADER_BYTES:]).split(b"\0", 1)[0].decode(errors="replace")
    code = header.error_code if header.error_code < len(ERROR_CLASSES) else 0
    error = ERROR_CLASSES[code](f"{who} failed in step {header.step}: {text}")
    return Incoming(sender, who, 0, False, data[:0], data[:0], data[:0], error)
