"""Names of Horovod's collectives that all ranks give to the same variable, whatever Keras calls it on each of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dgc.tensorflow.engine.horovod.horovod import HOROVOD, ProcessSet, import_horovod


class CommonNames:
    """Numbers variables in the order of their first use, which is the same on all ranks.

    Keras counts layers as they are made, so that one rank's names differ where it has built another model before.
    """

    def __init__(self, kind: str) -> None:
        """Local: no communication.

        Args:
            kind: of collective, a part of its name.
        """
        self._kind, self._prefix = kind, ""
        self._known: dict[int, tuple[str, Any]] = {}

    def of(self, variable: tf.Variable, process_set: ProcessSet) -> str:
        """The name for a variable; the first call is collective over ``process_set``.

        Args:
            variable: a ``tf.Variable``; it is held.
            process_set: the ranks that exchange, always the same.

        Raises:
            TransportError: Horovod's collective failed.
        """
        if not self._prefix:
            self._prefix = HOROVOD.unique_name(f"dgc.{self._kind}", process_set)
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
