"""The interface of one bucket's exchange at one density. Its classes are in ``dense_sum``, ``gather`` and ``owners``.

A plan's sizes depend only on the bucket, the options, the density and the number of ranks P. So all ranks have the same
plans without asking each other, and a resumed run makes the same plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from dgc.core.codecs import SmallCodec
from dgc.core.collectives import Transport
from dgc.core.compressors.base import DenseValues, SparseValues
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.encoders import Encoder
from dgc.core.exchange.sizes import Setting, gathering, reducing
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Array, Kernels, is_finite
from dgc.core.message import Form, Incoming, Messages
from dgc.core.state import BucketState
from dgc.core.stripes import Stripes
from dgc.errors import DGCError


class Plan(ABC):
    """One way to exchange one bucket at one density.

    A step calls ``begin``, ``prepare``, ``write``, ``exchange``, ``add_up_dense``, ``add_up`` and ``write_results``, in
    this order; then ``commit``, unless the step is dropped. If a rank fails before its message is out, it calls
    ``send_error`` instead.

    Attributes:
        way: the name of the way, for users.
        encodes: whether the encoder writes the message's payload. Otherwise its entries are sent in another way.
        encoder: selects entries of the sparsified tensors, if it has any ``ks``.
        vector: the tensors that are sent dense.
        small_codecs: for small tensors that are sent coded: one codec, or one for each rank's block.
        form: the sizes of the message.
        messages: the buffers of the message.
        reduces: whether an allreduce of the vector follows the message.
        traffic: what passes through a rank in a step.
        largest: bytes of the largest buffer that a rank gives to a collective.
        added: received entries or elements that a rank adds up.
        small_bytes: bytes that a rank sends for the tensors that are sent dense.
        stripes: the positions whose sums this rank keeps in its state; None if it keeps none.
        holds: the names of the arrays of :class:`BucketState` that only this way uses.
        is_out: whether this rank has sent its message. After that, the message cannot report an error any more.
    """

    way: ClassVar[str]
    encodes: ClassVar[bool] = False
    stripes: Stripes | None = None
    holds: Collection[str] = ()
    messages: Messages
    _sums: SparseValues | DenseValues
    _step: Step
    _transport: Transport
    _kernels: Kernels

    def __init__(
        self,
        setting: Setting,
        encoder: Encoder,
        vector: DenseVector,
        form: Form,
        small_codecs: Sequence[SmallCodec] = (),
    ) -> None:
        self._bucket, self._ranks = setting.bucket, setting.ranks
        self.encoder, self.vector, self.form, self.small_codecs = encoder, vector, form, small_codecs
        self.largest = form.nbytes
        self.added = self._ranks * form.count
        self.small_bytes = form.coded_bytes + vector.plain_bytes
        self.traffic, self.reduces = gathering(form.nbytes, self._ranks), not vector.is_inline
        if self.reduces:
            self.traffic = self.traffic.then(reducing(vector.plain_bytes, self._ranks))
        self.is_out = self._is_ready = False

    # -- a step, on the communication thread -----------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self._step, self.is_out = step, False

    def prepare(self, transport: Transport, kernels: Kernels) -> None:
        """Allocate the buffers, unless they are there, and begin the message. A second call does no harm."""
        self._transport, self._kernels = transport, kernels
        if not self._is_ready:
            self.vector.allocate(kernels)
            self.messages = Messages(self.form, self._bucket.index, transport, kernels.memory)
            self._is_ready = True
        self.messages.start(self._step.number, self._step.fingerprint)

    def release(self) -> None:
        """Free the buffers, because other steps have another plan."""
        if self._is_ready:
            self._kernels.wait()  # a device may still use the memory
            self.vector.free()
            del self.messages
            self._is_ready = False

    def write(self, state: BucketState) -> bool:
        """Write what is sent beside the payload; return whether all of it is finite."""
        finite = self.vector.code_small(state, self.small_codecs, self._blocks())
        if not self.reduces:
            self.messages.inline[:] = self.vector.plain.view(np.uint8)
        return finite

    def exchange(self, state: BucketState, *, nonfinite: bool, joined: int, absent: int) -> list[Incoming]:
        """Make the collectives; return the messages of all ranks. The arguments are flags of this rank's message."""
        return self._exchange(self.count, nonfinite=nonfinite, joined=joined, absent=absent)

    def add_up_dense(self, messages: Sequence[Incoming], factor: float) -> bool:
        """Turn the vector into the sum over the ranks, times ``factor``; return whether it is finite."""
        if self.small_codecs:
            self.vector.small.fill(0)
            for message in messages:
                with message.blamed():
                    codec = self.small_codecs[message.sender % len(self.small_codecs)]
                    codec.add(message.coded, self.vector.small)
        if not self.reduces:
            self.vector.add_plain([message.inline for message in messages])
        return self.vector.average(factor)

    @abstractmethod
    def add_up(self, messages: Sequence[Incoming], factor: float) -> bool:
        """Add up what the ranks have sent of sparsified tensors, times ``factor``; return whether it is finite."""

    def send_error(self, error: DGCError, parameter: int | None) -> None:
        """Send a message that carries an error; make all other collectives that the other ranks make."""
        self.encoder.catch_up(self._step)
        self.messages.write_error(error, parameter)
        self._gather()

    # -- the end of a step, on the caller's thread -------------------------------------------------------------------

    def write_results(self, results: Sequence[Array]) -> None:
        """Write the sums of sparsified tensors. Until then, autograd may still read the gradients' memory."""
        sums = self._sums
        del self._sums
        if isinstance(sums, SparseValues):
            self._kernels.set_entries(results, self._bucket.sparse_offsets, sums.positions, sums.values)
        else:
            for result, values in zip(results, sums.values, strict=True):
                result[...] = values

    @property
    def count(self) -> int:
        """How many entries this rank has sent."""
        return self.encoder.count

    def sent(self) -> SparseValues | DenseValues:
        """Return the entries that this rank has sent, with the values that receivers decode."""
        return self.encoder.sent()

    def commit(self, state: BucketState) -> None:
        """Store what was not sent in the arrays of the state, except u and v. A dropped step does not call this."""
        self.vector.commit(state, is_coded=bool(self.small_codecs))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _blocks(self) -> Sequence[np.ndarray]:
        """Return, for each of ``small_codecs``, the bytes for its block."""
        return [self.messages.coded] if self.small_codecs else []

    def _exchange(self, count: int, *, nonfinite: bool, joined: int, absent: int) -> list[Incoming]:
        self.messages.finish(count=count, nonfinite=nonfinite, joined=joined, absent=absent)
        messages = self._gather()
        if self.reduces:
            plain = self.vector.plain
            self._transport.allreduce(plain, "sum")
            self._step.stats.count_collective(plain.nbytes)
        return messages

    def _add_up(self, decoded: Sequence[SparseValues | DenseValues], factor: float) -> bool:
        """Keep the sum of what the ranks have sent, in their order, times ``factor``; return whether it is finite."""
        entries = [(each.positions, each.values) for each in decoded if isinstance(each, SparseValues)]
        if entries:
            from dgc.core.kernels import cpu  # this import loads Numba

            self._sums = SparseValues(*cpu.add_up(entries, factor))
            return is_finite(self._sums.values)
        dtype = np.dtype(self._bucket.dtype).type
        totals = [np.zeros(s.length, dtype) for s in self._bucket.sparse]
        for each in decoded:
            assert isinstance(each, DenseValues), "a compressor always returns the same type"
            for total, values in zip(totals, each.values, strict=True):
                total += values * dtype(factor)
        self._sums = DenseValues(totals)
        return all(map(is_finite, totals))

    def _gather(self) -> list[Incoming]:
        self.is_out = True
        self.messages.exchange()
        stats, nbytes = self._step.stats, self.form.nbytes
        stats.bytes_sent += nbytes
        stats.bytes_received += nbytes * (self._ranks - 1)
        return self.messages.receive()
