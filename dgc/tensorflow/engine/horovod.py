"""Horovod for TensorFlow: its module, a transport of its collectives, and names that all ranks share."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.adapter.job import Horovod
from dgc.core.transport import Transport
from dgc.errors import TransportError
from dgc.transport.choice import HorovodTransportBase

if TYPE_CHECKING:
    from horovod.tensorflow import ProcessSet as ProcessSet
else:
    ProcessSet = object
ReduceOp: TypeAlias = "int | str"
"""A constant of Horovod's, or its name."""

_ERRORS = (tf.errors.OpError, RuntimeError, ValueError)


class TensorFlowHorovod(Horovod):
    """Horovod for TensorFlow."""

    framework = "TensorFlow"
    module_name = "horovod.tensorflow"
    package = "dgc.tensorflow"

    def load(self) -> ModuleType:  # noqa: D102
        try:
            import horovod.tensorflow as hvd
        except tf.errors.NotFoundError as error:
            raise ImportError(str(error)) from error
        return hvd

    def gather_bytes(self, message: np.ndarray, name: str) -> np.ndarray:
        """Join the members' messages in rank order, also while a TensorFlow function is being traced.

        Raises:
            TransportError: Horovod's collective failed.
        """
        hvd = self.module()
        # CPU tensors: a NCCL build must not take bytes that live in host memory to a GPU. init_scope leaves a trace.
        with tf.init_scope(), tf.device("/cpu:0"):
            try:
                out = hvd.allgather(tf.constant(message), name=name, process_set=self.members, ignore_name_scope=True)
            except _ERRORS as error:
                raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error
            return np.asarray(out)

    def own_transport(self) -> Transport:  # noqa: D102
        return HorovodTransport(self)


HOROVOD = TensorFlowHorovod()
import_horovod = HOROVOD.module
is_alone = HOROVOD.is_alone


class HorovodTransport(HorovodTransportBase):
    """Collectives of ``horovod.tensorflow``, called as single eager operations.

    An eager operation runs on the thread that calls it, so it does not need a free thread of TensorFlow's pool, all of
    which may be waiting for this very exchange. One call takes about 3 ms, most of it Horovod's cycle time.
    """

    def __init__(self, job: TensorFlowHorovod = HOROVOD) -> None:
        """Agree on names. Collective over the job's ranks.

        Raises:
            ConfigError: Horovod is not ready, or this process is not one of them.
            TransportError: Horovod's collective failed.
        """
        self._job, self._hvd = job, job.module()
        self._process_set = job.require_member()
        self._prefix = job.unique_name("dgc.transport")
        super().__init__(job.rank, job.size)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        return self._job.gather_bytes(message, f"{self._prefix}.allgather.{message.size}")

    def _sum(self, array: np.ndarray) -> None:
        name = f"{self._prefix}.allreduce.{array.dtype.name}.{array.size}"
        options = {"op": self._hvd.Sum, "process_set": self._process_set, "ignore_name_scope": True}
        with tf.init_scope(), tf.device("/cpu:0"):
            try:
                total = self._hvd.allreduce(tf.constant(array), name=name, **options)
            except _ERRORS as error:
                raise TransportError(f"Horovod could not sum {array.size} elements: {error}") from error
            np.copyto(array, np.asarray(total))

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()


class CommonNames:
    """Names of collectives that all ranks give to the same variable, by the order of first use.

    Keras counts layers as they are made, so that one rank's names differ where it has built another model before.
    """

    def __init__(self, kind: str) -> None:
        """Local: no communication. ``kind`` is the kind of collective, a part of its name."""
        self._kind, self._prefix = kind, ""
        self._known: dict[int, tuple[str, Any]] = {}

    def of(self, variable: tf.Variable, process_set: ProcessSet) -> str:
        """The name for a variable, which is held; the first call is collective over ``process_set``.

        Raises:
            TransportError: Horovod's collective failed.
        """
        if not self._prefix:
            self._prefix = HOROVOD.of(process_set).unique_name(f"dgc.{self._kind}")
        name, _ = self._known.setdefault(id(variable), (f"{self._prefix}.{len(self._known)}", variable))
        return name


def gather_slices(slices: tf.IndexedSlices, name: str, process_set: ProcessSet, *, is_sum: bool) -> tf.IndexedSlices:
    """All ranks' slices, divided by their number unless they are to be summed.

    Horovod's allreduce does the same, under names that differ between ranks where Keras' do.
    """
    hvd = import_horovod()
    options = {"process_set": process_set, "ignore_name_scope": True}
    kind = slices.values.dtype
    given = tf.cast(slices.values, tf.float32) if kind == tf.bfloat16 else slices.values  # Horovod has no kernel for it
    values = hvd.allgather(given, name=f"{name}.values", **options)
    indices = hvd.allgather(slices.indices, name=f"{name}.indices", **options)
    if not is_sum:
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(tf.cast(values, kind), indices, slices.dense_shape)
