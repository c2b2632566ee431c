"""Horovod's own collectives as a transport: works wherever Horovod does (MPI, Gloo, with or without NCCL)."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dgc.core.transport import Transport
from dgc.errors import TransportError
from dgc.tensorflow.engine.horovod.horovod import HOROVOD, ProcessSet, gather_bytes, import_horovod, member_set
from dgc.transport.horovod import HorovodTransportBase


class HorovodTransport(HorovodTransportBase):
    """Collectives of ``horovod.tensorflow``, called as single eager operations.

    An eager operation runs on the thread that calls it, so it does not need a free thread of TensorFlow's pool, all of
    which may be waiting for this very exchange. One call takes about 3 ms, most of it Horovod's cycle time.
    """

    def __init__(self, process_set: ProcessSet | None = None, name_prefix: str = "dgc") -> None:
        """Agree on names. Collective over the ranks of ``process_set``.

        Args:
            process_set: a ``hvd.ProcessSet``, or None for all ranks.
            name_prefix: begins all tensor names.

        Raises:
            ConfigError: Horovod is not ready, or this process is not in ``process_set``.
            TransportError: Horovod's collective failed.
        """
        self._hvd = import_horovod()
        self._process_set = member_set(process_set)
        self._prefix = HOROVOD.unique_name(f"{name_prefix}.transport", self._process_set)
        super().__init__(self._process_set.rank(), self._process_set.size())

    def _gather(self, message: np.ndarray) -> np.ndarray:
        return gather_bytes(message, f"{self._prefix}.allgather.{message.size}", self._process_set)

    def _sum(self, array: np.ndarray) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            try:
                total = self._hvd.allreduce(
                    tf.constant(array),
                    op=self._hvd.Sum,
                    name=f"{self._prefix}.allreduce.{array.dtype.name}.{array.size}",
                    process_set=self._process_set,
                    ignore_name_scope=True,
                )
            except (tf.errors.OpError, RuntimeError, ValueError) as error:
                raise TransportError(f"Horovod could not sum {array.size} elements: {error}") from error
            np.copyto(array, np.asarray(total))

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()


def make_transport(choice: str | Transport = "auto", process_set: ProcessSet | None = None) -> Transport:
    """Make the transport for a group of ranks: see :meth:`dgc.adapter.horovod.Horovod.make_transport`."""
    return HOROVOD.make_transport(choice, process_set, HorovodTransport)
