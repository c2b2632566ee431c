"""A writer of ``tf.summary`` with TensorBoard's ``add_scalar``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")
"""TensorBoard's mark of a scalar. ``tf.summary.scalar`` needs an installed TensorBoard; writing needs none."""


class SummaryWriter:
    """Writes scalars with a writer of ``tf.summary.create_file_writer``."""

    def __init__(self, writer: Any) -> None:
        """Take the writer, which stays the user's: to flush and to close."""
        self._writer = writer

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one number, also from within the step of a graph."""
        with tf.init_scope(), self._writer.as_default(step), tf.summary.record_if(True):
            tf.summary.write(tag, tf.constant(value, tf.float32), metadata=_SCALAR)


def as_writer(writer: object) -> Any:
    """The writer itself if it has ``add_scalar``, or one around a writer of ``tf.summary``."""
    return SummaryWriter(writer) if hasattr(writer, "as_default") else writer
