"""Saving and restoring each rank's compressor beside the model's own checkpoint."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.core.state.checks import require_sound
from dgc.core.state.file import load_state, save_state
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.tensorflow.engine.horovod.horovod import import_horovod, is_alone
from dgc.transport.agreement import agree_or_raise, busy

_Callback: Any = tf.keras.callbacks.Callback

ITERATIONS = "optimizer_iterations"


class CompressionCheckpoint(_Callback):
    """Writes this rank's residuals at the end of each epoch, and takes them up again when training begins.

    A model's checkpoint is the same on all ranks and is written by one; residuals differ and every rank writes its own.
    When training begins, the file that belongs to the model's state is the one with the optimizer's number of
    iterations. A model that was not restored begins with empty residuals, and one that goes on training keeps its own.
    """

    def __init__(self, filepath: str, save_freq: str | int = "epoch", restore: bool = True) -> None:
        """Keep the states in files.

        Args:
            filepath: may contain ``{epoch}``, as in ``ModelCheckpoint``; each rank adds ``.rank<r>.npz``.
            save_freq: "epoch", or a number of steps.
            restore: take up a saved state when training begins.

        Raises:
            ConfigError: ``save_freq`` is something else.
        """
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ConfigError(f"save_freq is {save_freq!r}; allowed: 'epoch' or a number of steps >= 1")
        self._filepath = str(filepath)
        self._save_freq = save_freq
        self._restore = restore
        self._epoch = 0
        self._saved_at = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore, if there is something to restore.

        Raises:
            LayoutError: the ranks' models have made different numbers of steps, or a rank's file is missing or belongs
                to another model or number of ranks.
        """
        optimizer = self.model.optimizer
        optimizer = optimizer if hasattr(optimizer, "bind") else getattr(optimizer, "inner_optimizer", optimizer)
        self._owner = optimizer
        if not hasattr(optimizer, "bind"):
            raise ConfigError("CompressionCheckpoint needs dgc.tensorflow.keras.DistributedOptimizer in compile()")
        self._saved_at = self._iterations()
        iterations, is_new = self._common_progress()
        if self._restore and iterations > 0:
            optimizer.bind(self.model.trainable_variables)
            self._load(is_new)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write this rank's file."""
        if self._save_freq == "epoch":
            self.save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write this rank's file when the optimizer has made another ``save_freq`` steps."""
        if self._save_freq == "epoch":
            return
        # With steps_per_execution this is called once in several steps.
        every, now = int(self._save_freq), self._iterations()
        if now // every > self._saved_at // every:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Write this rank's file now; call it on all ranks.

        Raises:
            LayoutError: called in the middle of a step or after one that failed, or the state is not finite.
            TransportError: a rank could not write; every rank gets the error, and what they saved before stays.
        """
        engine = self._engine
        if engine is None:
            return
        engine.require_open("CompressionCheckpoint.save()")
        # Here alone: where one rank's step has failed, the others may be in the next.
        engine.require_whole("CompressionCheckpoint.save()")
        asked = False

        def ask(here: Callable[[], dict[str, Any]]) -> None:
            nonlocal asked
            asked = True
            agree_or_raise(
                engine.transport, here, "results of the attempt to save the compressor's state", TransportError
            )

        try:
            with busy(engine.transport):
                state = {**engine.state_dict(), ITERATIONS: self._iterations()}
                require_sound(state)
                path = self._path(self._filepath.format(epoch=self._epoch + 1))
                save_state(path, state, lambda: ask(lambda: {"iterations": state[ITERATIONS]}))
        except Exception as error:
            if not asked:
                failed = error

                def tell() -> dict[str, Any]:
                    raise failed

                ask(tell)
            raise

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Any:
        compression = self._owner.compression
        return None if compression is None else compression.engine

    def _path(self, prefix: str) -> str:
        return f"{prefix}.rank{self._engine.transport.rank}.npz"

    def _iterations(self) -> int:
        return int(tf.convert_to_tensor(self.model.optimizer.iterations))

    def _common_progress(self) -> tuple[int, bool]:
        """The optimizer's iterations, and whether the compressor has made no step; an error where ranks differ."""
        iterations, compression, engine = self._iterations(), self._owner.compression, self._engine
        steps = 0 if engine is None else engine.stats.steps
        chosen = None if compression is None else compression.process_set(self._owner.process_set)
        if chosen is not None and not is_alone(chosen):
            hvd = import_horovod()
            own = tf.constant([[iterations, int(steps > 0)]], tf.int64)
            rows = np.asarray(hvd.allgather(own, name="dgc.iterations", process_set=chosen))
            if (rows != rows[0]).any():
                raise LayoutError(
                    f"the ranks' optimizers have made {rows[:, 0].tolist()} steps, or only some of their compressors "
                    "any; place CompressionCheckpoint after BroadcastGlobalVariablesCallback in the list of callbacks, "
                    "or load the model on every rank"
                )
        return iterations, steps == 0

    def _load(self, is_needed: bool) -> None:
        engine = self._engine
        if engine is None:
            return
        found: dict[str, Any] = {}

        def find() -> dict[str, Any]:
            pattern = self._path(glob.escape(self._filepath).replace("{epoch", "\0").split("\0")[0] + "*")
            if "{epoch" not in self._filepath:
                pattern = self._path(glob.escape(self._filepath))
            unreadable = ""
            for path in sorted(glob.glob(pattern), key=lambda p: Path(p).stat().st_mtime, reverse=True):
                try:
                    state = load_state(path)
                except LayoutError as error:
                    unreadable = unreadable or f". Or it is the one that cannot be read: {error}"
                    continue
                if state.get(ITERATIONS) == self._iterations():
                    found.update(state)
                    return {"iterations": self._iterations()}
            if not is_needed:
                return {"iterations": "no file"}
            raise LayoutError(
                f"no file {pattern} belongs to a model of {self._iterations()} iterations; restore the model and the "
                f"compressor from the same moment, or pass restore=False to begin with empty residuals{unreadable}"
            )

        agree_or_raise(engine.transport, find, "checkpoints of the compressor", LayoutError)
        if found:
            self._owner.compression.load_state_dict(found)
