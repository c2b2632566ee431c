"""Save and restore each rank's compressor next to the model's own checkpoint."""

from __future__ import annotations

import glob
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.agreement import agree_or_raise, require_agreement, tell_error
from dgc.core.saved import INACTIVE, needed_ranks, require_sound
from dgc.core.state_file import load_state, save_state
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.tensorflow.adoption import without_loss_scale
from dgc.tensorflow.horovod import import_horovod, is_alone
from dgc.tensorflow.reduce import reducer_of

ITERATIONS = "optimizer_iterations"


class CompressionCheckpoint(tf.keras.callbacks.Callback):
    """Writes this rank's residuals at the end of each epoch, and loads them when training begins.

    A model's checkpoint is the same on all ranks, and one rank writes it. Residuals differ, so every rank writes its
    own. When training begins, the callback loads the file that was saved at the optimizer's number of iterations.
    Without such a file, a model that continues training keeps its residuals. A new model begins with empty residuals.

    With step-ahead error feedback it makes the ranks' models and optimizers equal after the last batch of an epoch.
    With a number of steps as ``save_freq``, or data of unknown length, it does so when it saves: place it before
    callbacks that save the model.
    """

    def __init__(
        self, filepath: str, save_freq: str | int = "epoch", restore: bool = True, resize: bool = False
    ) -> None:
        """Check the arguments.

        Args:
            filepath: the path of the files. It may contain ``{epoch}``, as in ``ModelCheckpoint``; each rank adds
                ``.rank<r>.npz``.
            save_freq: "epoch", or a number of steps.
            restore: load a saved state when training begins.
            resize: also load the state of a job with another number of ranks. Every rank must be able to read all files
                of that job. Residuals and momentum are redistributed so that their mean is kept. A single process
                drops them, with a warning.

        Raises:
            ConfigError: ``save_freq`` is neither "epoch" nor a number of steps.
        """
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ConfigError(f"save_freq is {save_freq!r}; allowed: 'epoch' or a number of steps >= 1")
        self._filepath = str(filepath)
        self._save_freq = save_freq
        self._restore, self._resize = restore, resize
        self._epoch = 0
        self._saved_at = 0
        self._is_restored = self._is_averaged = False

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
            LayoutError: the ranks' models have made different numbers of steps; or a rank's file is missing or belongs
                to another model; or it comes from another number of ranks, without ``resize``.
        """
        self._epoch, self._is_averaged = epoch, False
        if self._is_restored:
            return
        self._is_restored, self._saved_at = True, self._iterations()
        iterations, is_new = self._common_progress()
        if self._restore and iterations > 0:
            self._reducer.bind(self.model.trainable_variables, without_loss_scale(self.model.optimizer))
            self._load(is_new)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write this rank's file."""
        if self._save_freq == "epoch":
            self.save()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write this rank's file when the optimizer has made another ``save_freq`` steps."""
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
        """Write this rank's file now. Call it on all ranks.

        Raises:
            LayoutError: it was called in the middle of a step or after one that failed, or the state is not finite.
            TransportError: a rank could not write. Every rank gets the error, and earlier files stay.
        """
        engine = self._reducer.engine
        if engine is None:
            if self._is_alone:  # from this file, a later job of several ranks learns that there are no residuals
                save_state(self._path(self._filled, 0), {**INACTIVE, ITERATIONS: self._iterations()})
            return
        engine.require_open("CompressionCheckpoint.save()")
        # Check this on this rank only: if its step has failed, the others may be in the next step.
        engine.require_between_steps("CompressionCheckpoint.save()", whole=True)
        if not self._is_averaged:
            self._average()
        self._is_averaged = False
        asked, iterations = False, self._iterations()

        def ask() -> None:
            nonlocal asked
            asked = True
            what = "results of the attempt to save the compressor's state"
            require_agreement(engine.transport, {"iterations": iterations}, what, TransportError)

        try:
            state = {**engine.state_dict(), ITERATIONS: iterations}
            require_sound(state)
            save_state(self._path(self._filled, engine.transport.rank), state, ask)
        except Exception as error:
            if not asked:
                tell_error(engine.transport, error)
            raise
        if engine.adoption.moment is not None:
            engine.adoption.moment.clear_slots()  # so that this run goes on as one that loads the saved model

    # -- inside --------------------------------------------------------------------------------------------------

    def _average(self) -> None:
        if self._reducer.compression is not None:
            self._reducer.compression.average(self.model.optimizer)
            self._is_averaged = True

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

    def _path(self, prefix: str, rank: int) -> str:
        return f"{prefix}.rank{rank}.npz"

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
            # One process drops the residuals of several ranks; load_state_dict() warns of that.
            if self._is_alone and is_needed:
                states, _ = self._found(0, 1, is_needed)
                if len(states) > 1:
                    compression.load_state_dict(states, resize=True)
            return
        found: list[Any] = []

        def find() -> dict[str, Any]:
            states, nearly = self._found(engine.transport.rank, engine.transport.size, is_needed)
            found.extend(states)
            if states:
                return {"iterations": self._iterations(), "ranks that saved it": len(states)}
            if not is_needed:
                return {"iterations": "no file"}
            raise LayoutError(
                f"no file {self._pattern(engine.transport.rank)} belongs to a model of {self._iterations()} "
                "iterations; restore the model and the compressor from the same moment, or pass restore=False to begin "
                f"with empty residuals{nearly}"
            )

        agree_or_raise(engine.transport, find, "checkpoints of the compressor", LayoutError)
        if len(found) == engine.transport.size:
            compression.load_state_dict(found[engine.transport.rank])
        elif found:
            compression.load_state_dict(found, resize=True)

    def _found(self, rank: int, size: int, is_needed: bool) -> tuple[list[Any], str]:
        """Return the states that fit the model, in rank order, and a hint about a file that cannot be read.

        Entries are None if this rank does not need them.
        """
        path, own, nearly = self._fitting(rank)
        old = int(own.get("size", size))
        if own and old == size:
            return [own if r == rank else None for r in range(size)], ""
        if not own and rank:
            path, own, _ = self._fitting(0)  # the files may come from a job with fewer ranks
            old = int(own.get("size", size))
        if not is_needed or old == size:
            return [], nearly
        if not self._resize:
            raise LayoutError(
                f"{path} was saved by {old} rank{'s' * (old > 1)}, this job has {size}; pass resize=True to "
                "CompressionCheckpoint, with the files of all old ranks in a folder that every rank can read, or "
                "restore=False to begin with empty residuals"
            )
        prefix = path.rpartition(".rank")[0]
        states: list[Any] = [None] * old
        for r in needed_ranks(rank, old, size):
            states[r] = load_state(self._path(prefix, r))
            if states[r].get(ITERATIONS) != self._iterations():
                raise LayoutError(
                    f"{self._path(prefix, r)} was saved at iteration {states[r].get(ITERATIONS)}, but the model is at "
                    f"iteration {self._iterations()}; replace it with the file that was saved together with those of "
                    f"all {old} ranks"
                )
        return states, ""

    def _fitting(self, rank: int) -> tuple[str, dict[str, Any], str]:
        """Find a rank's newest file with the model's iterations; return its path, its state and a hint.

        Without such a file the path and the state are empty, and the hint names a file that cannot be read.
        """
        unreadable = ""
        for path in sorted(glob.glob(self._pattern(rank)), key=lambda p: Path(p).stat().st_mtime, reverse=True):
            try:
                state = load_state(path)
            except LayoutError as error:
                unreadable = unreadable or f". There is a file that cannot be read: {error}"
                continue
            if state.get(ITERATIONS) == self._iterations():
                return path, state, ""
        return "", {}, unreadable

    def _pattern(self, rank: int) -> str:
        begin, _, rest = glob.escape(self._filepath).partition("{epoch")
        return self._path(begin + "*" * bool(rest), rank)
