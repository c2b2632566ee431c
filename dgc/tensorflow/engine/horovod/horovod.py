"""Horovod for TensorFlow, or an error that says how to get it; and small questions to all ranks."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.adapter.horovod import Horovod
from dgc.errors import TransportError

if TYPE_CHECKING:
    from horovod.tensorflow import ProcessSet as ProcessSet
else:
    ProcessSet = object
ReduceOp: TypeAlias = "int | str"
"""A constant of Horovod's, or its name."""


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

    def gather_bytes(self, message: np.ndarray, name: str, process_set: ProcessSet | None) -> np.ndarray:
        """Join the members' messages in rank order, also while a TensorFlow function is being traced.

        Raises:
            TransportError: Horovod's collective failed.
        """
        hvd = self.module()
        # CPU tensors: a NCCL build must not take bytes that live in host memory to a GPU. init_scope leaves a trace.
        with tf.init_scope(), tf.device("/cpu:0"):
            try:
                out = hvd.allgather(tf.constant(message), name=name, process_set=process_set, ignore_name_scope=True)
            except (tf.errors.OpError, RuntimeError, ValueError) as error:
                raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error
            return np.asarray(out)


HOROVOD = TensorFlowHorovod()
import_horovod = HOROVOD.module
is_alone = HOROVOD.is_alone
member_set = HOROVOD.member_set
gather_bytes = HOROVOD.gather_bytes
