"""Save and restore the compressor next to the model's own checkpoint."""

from __future__ import annotations

import glob
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.agreement import agree_or_raise, require_agreement
from dgc.core.collectives import Transport, gather_values
from dgc.core.saved import INACTIVE, require_sound
from dgc.core.state_file import load_state, put_back, save_state, take_out
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.tensorflow.adoption import without_loss_scale
from dgc.tensorflow.horovod import import_horovod, is_alone
from dgc.tensorflow.reduce import reducer_of

ITERATIONS = "optimizer_iterations"


class CompressionCheckpoint(tf.keras.callbacks.Callback):
    """Writes residuals and momentum at the end of each epoch, and loads them when training begins.

    The ranks become equal after the last batch of an epoch (``compression.average(optimizer)``), and rank 0 writes the
    file. With a number of steps as ``save_freq``, or data of unknown length, they become equal when it saves: place it
    before callbacks that save the model.

    When training begins, rank 0 looks for a file that was saved at the optimizer's number of iterations, and all ranks
    load its content, on any number of ranks. Without such a file, a model that continues training keeps its residuals.
    A new model begins with empty residuals.
    """

    def __init__(self, filepath: str, save_freq: str | int = "epoch", restore: bool = True) -> None:
        """Check the arguments.

        Args:
            filepath: the path of the files. It may contain ``{epoch}``, as in ``ModelCheckpoint``; ``.npz`` is added.
            save_freq: "epoch", or a number of steps.
            restore: load a saved state when training begins.

        Raises:
            ConfigError: ``save_freq`` is neither "epoch" nor a number of steps.
        """
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ConfigError(f"save_freq is {save_freq!r}; allowed: 'epoch' or a number of steps >= 1")
        self._filepath = str(filepath)
        self._save_freq = save_freq
        self._restore = restore
        self._epoch = 0
        self._saved_at = 0
        self._is_restored = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the compressor.

        Raises:
            ConfigError: the model's optimizer has none.
        """
        self._reducer: Any = reducer_of(self.model.optimizer)
        if self._reducer is None:
            raise ConfigError("CompressionCheckpoint needs dgc.tensorflow.keras.DistributedOptimizer in compile()")
        self._is_restored = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch. In the first one restore the compressor if the model was restored.

        Other callbacks, such as ``BackupAndRestore``, have restored the model then.

        Raises:
            LayoutError: the ranks' models have made different numbers of steps; or the file is missing or belongs to
                another model.

        Warns:
            RuntimeWarning: a single process drops the residuals of several ranks.
        """
        self._epoch = epoch
        if self._is_restored:
            return
        self._is_restored, self._saved_at = True, self._iterations()
        iterations, is_new = self._common_progress()
        if self._restore and iterations > 0:
            self._reducer.bind(self.model.trainable_variables, without_loss_scale(self.model.optimizer))
            self._load(is_new)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the file."""
        if self._save_freq == "epoch":
            self.save()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the file when the optimizer has made another ``save_freq`` steps."""
        if self._save_freq == "epoch":
            if batch + 1 >= (self.params.get("steps") or math.inf):  # more with steps_per_execution
                self._average()
            return
        # With steps_per_execution Keras calls this once for several steps.
        every, now = int(self._save_freq), self._iterations()
        if now // every > self._saved_at // every:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Write the file now. Call it on all ranks.

        Raises:
            LayoutError: it was called in the middle of a step or after one that failed, or the state is not finite.
            TransportError: rank 0 could not write. Every rank gets the error, and earlier files stay.
        """
        engine, iterations = self._reducer.engine, self._iterations()
        if engine is None:
            if self._is_alone:  # from this file, a later job of several ranks learns that there are no residuals
                save_state(f"{self._filled}.npz", {**INACTIVE, ITERATIONS: iterations})
            return
        engine.require_open("CompressionCheckpoint.save()")
        # Check this on this rank only: if its step has failed, the others may be in the next step.
        engine.require_between_steps("CompressionCheckpoint.save()", whole=True)
        if not engine.is_equal:
            self._average()

        def write() -> dict[str, Any]:
            if engine.transport.rank == 0:
                state = {**engine.state_dict(), ITERATIONS: iterations}
                require_sound(state)
                save_state(f"{self._filled}.npz", state)
            return {}

        what = "results of the attempt to save the compressor's state"
        require_agreement(engine.transport, {"iterations": iterations}, what, TransportError)
        agree_or_raise(engine.transport, write, what, TransportError)

    # -- inside --------------------------------------------------------------------------------------------------

    def _average(self) -> None:
        if self._reducer.compression is not None:
            self._reducer.compression.average(self.model.optimizer)

    @property
    def _is_alone(self) -> bool:
        """Whether this is a job of one process, and the compressor is bound."""
        compression = self._reducer.compression
        return (
            compression is not None and compression.is_bound and compression.takes_part and self._reducer.engine is None
        )

    @property
    def _filled(self) -> str:
        return self._filepath.format(epoch=self._epoch + 1)

    def _iterations(self) -> int:
        return int(tf.convert_to_tensor(self.model.optimizer.iterations))

    def _common_progress(self) -> tuple[int, bool]:
        """Return the optimizer's iterations, and whether the compressor has made no step. Raise if ranks differ."""
        iterations, reducer = self._iterations(), self._reducer
        steps = 0 if reducer.engine is None else reducer.engine.stats.steps
        if reducer.compression is not None and not is_alone(reducer.members):
            hvd = import_horovod()
            own = tf.constant([[iterations, int(steps > 0)]], tf.int64)
            chosen = reducer.members or hvd.global_process_set
            rows = np.asarray(hvd.allgather(own, name="dgc.iterations", process_set=chosen))
            if (rows != rows[0]).any():
                raise LayoutError(
                    f"the ranks' optimizers have made {rows[:, 0].tolist()} steps, or only some of their compressors "
                    "have made any; add BroadcastGlobalVariablesCallback to the callbacks, or load the model on every "
                    "rank"
                )
        return iterations, steps == 0

    def _load(self, is_needed: bool) -> None:
        engine, compression = self._reducer.engine, self._reducer.compression
        if engine is None:
            if self._is_alone and is_needed:  # load_state_dict() warns that residuals are dropped
                compression.load_state_dict(self._find()[0])
            return
        state: dict[str, Any] = {}

        def look() -> dict[str, Any]:
            if engine.transport.rank == 0:
                found, nearly = self._find()
                state.update(found)
                if is_needed and not found:
                    raise LayoutError(
                        f"no file {self._pattern()} on rank 0 belongs to a model of {self._iterations()} iterations; "
                        "restore the model and the compressor from the same moment, or pass restore=False to begin "
                        f"with empty residuals{nearly}"
                    )
            return {}

        agree_or_raise(engine.transport, look, "checkpoints of the compressor", LayoutError)
        if shared := _of_rank_0(state, engine.transport):
            compression.load_state_dict(shared)

    def _find(self) -> tuple[dict[str, Any], str]:
        """Return the state of the newest file with the model's iterations and a hint about unreadable files."""
        unreadable = ""
        for path in sorted(glob.glob(self._pattern()), key=lambda p: Path(p).stat().st_mtime, reverse=True):
            try:
                state = load_state(path)
            except LayoutError as error:
                unreadable = unreadable or f". There is a file that cannot be read: {error}"
                continue
            if state.get(ITERATIONS) == self._iterations():
                return state, ""
        return {}, unreadable

    def _pattern(self) -> str:
        begin, _, rest = glob.escape(self._filepath).partition("{epoch")
        return f"{begin}{'*' * bool(rest)}.npz"


def _of_rank_0(state: dict[str, Any], transport: Transport) -> Any:
    """Return rank 0's state on all ranks; the others give an empty one. Collective."""
    arrays: dict[str, np.ndarray] = {}
    given = [take_out(state, arrays), [[name, a.dtype.str, a.shape] for name, a in arrays.items()]]
    header, shapes = gather_values(transport, given)[0]
    for name, kind, shape in shapes:
        array = arrays.setdefault(name, np.full(shape, -0.0, kind))  # adding -0.0 changes no number
        transport.allreduce(array, "sum")
    return put_back(header, arrays)
