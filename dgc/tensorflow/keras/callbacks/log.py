"""Norms of residuals in the logs of ``fit()`` and in a writer of ``tf.summary``."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import tensorflow as tf

from dgc.adapter.metrics import NOWHERE, Log
from dgc.core.probe import FIGURES
from dgc.errors import ConfigError
from dgc.tensorflow.engine.optimizers import without_loss_scale

OURS = {name: f"compression_{name}" for name in FIGURES}
"""Figures' names in the logs; each rank's own, never averaged."""


class LogCompression(tf.keras.callbacks.Callback):
    """Looks into the compressor while ``fit()`` runs, every so many steps.

    The total over all compressed variables is added to the logs of each epoch, as ``compression_residual_norm``,
    ``compression_sent_share`` and so on, of the latest step that was looked at; with a writer, every variable's figures
    are written as well. Figures are this rank's own: give the callback to rank 0 or to all ranks, after a
    ``MetricAverageCallback``, and let nothing that all ranks must do alike (``EarlyStopping``) depend on them. A log of
    ``log_to()`` rests until ``fit()`` has ended, which a warning says.
    """

    def __init__(self, writer: Any = None, every: int = 100, prefix: str = "compression") -> None:
        """Log from the beginning of ``fit()`` to its end.

        Args:
            writer: of ``tf.summary.create_file_writer``, or anything with ``add_scalar(tag, value, step)``; None for
                the logs alone.
            every: the number of a step that is looked at is a multiple of this.
            prefix: of the writer's tags.

        Raises:
            ConfigError: the writer is something else, or ``every`` is no number of steps.
        """
        super().__init__()
        self._arguments = (NOWHERE if writer is None else writer, every, prefix)
        if not hasattr(writer, "as_default"):
            Log(*self._arguments, waits=False)
        else:
            Log(NOWHERE, every, prefix, waits=False)
        self._compression: Any = None
        self._end: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Turn the log on.

        Raises:
            ConfigError: the model's optimizer has no compressor of ours.

        Warns:
            RuntimeWarning: ``log_to()`` was on.
        """
        optimizer = self.model.optimizer
        owners = (optimizer, without_loss_scale(optimizer))
        found = next((c for c in (getattr(o, "compression", None) for o in owners) if hasattr(c, "begin_log")), None)
        self._end_log()  # of a fit() that an exception ended
        if found is None:
            raise ConfigError(
                "LogCompression needs an optimizer with a compressor in compile(): "
                "dgc.tensorflow.keras.DistributedOptimizer(..., compression=Compression.dgc(...)), or DGCMomentum"
            )
        self._compression = found
        guest = found.begin_log(*self._arguments)
        # Keras tells no callback of an exception: then the log lasts until the callback is gone.
        self._end = weakref.finalize(self, found.end_log, guest)
        self._end.atexit = False
        if found.log_rests:
            warnings.warn(
                "log_to() was on; while LogCompression looks into the same compressor, nothing is written to its "
                "writer",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the total of the latest step that was looked at."""
        if logs is None or self._compression is None:
            return
        look = self._compression.inside
        if len(look):
            logs.update({OURS[name]: value for name, value in look.total.as_dict().items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Turn the log off; what was seen last stays in ``compression.inside``."""
        self._end_log()
        self._compression = None

    def _end_log(self) -> None:
        if self._end is not None:
            self._end()
