"""The training loops of TensorFlow in the matrix of chaos: a tape, Keras' fit, and Horovod's dense tape."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from rank import Rank, run

import dgc.tensorflow.keras as dgc_keras
from dgc import tensorflow as dgc
from dgc.core.state import save_state


def _tell(rank: Rank, place: str) -> Any:
    """Call the rank within a graph; the operation, for what must come later."""

    def call() -> np.float32:
        rank.at(place)
        return np.float32(0)

    return tf.numpy_function(call, [], tf.float32)


class Places(keras.layers.Layer):
    """Tells where a step is, in the forward and in the backward pass; changes nothing."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def call(self, x: Any) -> Any:
        rank = self._rank
        told = _tell(rank, "forward")
        if rank.fault.where == "forward" and rank.fault.name.startswith("memory"):
            with tf.control_dependencies([told]):
                x = x + tf.reduce_sum(tf.random.uniform([2**24])) * 0.0

        @tf.custom_gradient
        def through(x: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                _tell(rank, "backward")
                return upstream

            return tf.identity(x), gradient

        return through(x)


class Update:
    """A constraint that tells when an update is made: Keras calls it in its optimizer; changes nothing."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __call__(self, kernel: Any) -> Any:
        _tell(self._rank, "update")
        return kernel


class Steps(keras.callbacks.Callback):
    """Tells the rank when each step begins, and saves when it is time."""

    def __init__(self, rank: Rank, checkpoint: Any) -> None:
        super().__init__()
        self._rank, self._checkpoint, self._step = rank, checkpoint, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._rank.begin(self._step)
        self._step += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._rank.fault.where == "outside" and _is_time(self._rank):
            self._checkpoint.save()
            if hvd.rank() == 0:
                self.model.save_weights(self._rank.folder / "checkpoint" / "model.weights.h5")
            self._rank.saved()
            self.model.stop_training = True


def _make_model(rank: Rank) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Dense(256, activation="relu"),
            Places(rank),
            keras.layers.Dense(256, kernel_constraint=Update(rank)),
            keras.layers.Dense(256),
            keras.layers.Dense(1),
        ]
    )
    model.build((None, 64))
    return model


def _batches(steps: int) -> Any:
    data = np.random.default_rng(hvd.rank())
    for _ in range(steps):
        yield data.standard_normal((8, 64), np.float32), np.zeros((8, 1), np.float32)


def _is_time(rank: Rank) -> bool:
    """Whether to save and end: a rank may be told a step before another, so ranks that agree ask each other."""
    if rank.fault.name != "save_agreed":
        return rank.told
    return bool(hvd.allreduce(tf.constant(float(rank.told)), name="told", op=hvd.Sum))


def train(way: str, rank: Rank) -> None:
    """Train a small model until the fault ends it, or to its last step."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    model = _make_model(rank)
    rank.initialised(hvd.rank())
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    rank.wraps()
    saved = (_fit if way == "keras" else _loop)(way, rank, model, optimizer)
    if not saved:
        rank.finished(model.get_weights())


def _fit(way: str, rank: Rank, model: Any, optimizer: Any) -> bool:
    optimizer = dgc_keras.DistributedOptimizer(optimizer, compression=dgc_keras.Compression.dgc(sparsity=0.99))
    model.compile(optimizer=optimizer, loss="mse")
    (rank.folder / "checkpoint").mkdir(exist_ok=True)
    checkpoint = dgc_keras.callbacks.CompressionCheckpoint(str(rank.folder / "checkpoint" / "dgc"), save_freq=10**9)
    model.fit(
        _batches(rank.steps),
        steps_per_epoch=rank.steps,
        verbose=0,
        callbacks=[dgc_keras.callbacks.BroadcastGlobalVariablesCallback(0), checkpoint, Steps(rank, checkpoint)],
    )
    return model.stop_training


def _loop(way: str, rank: Rank, model: Any, optimizer: Any) -> bool:
    compression = dgc.Compression.dgc(optimizer=optimizer, sparsity=0.99) if way == "tape" else None
    variables = model.trainable_variables
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    # Horovod's own tape knows no variables of Keras 3.
    sources = variables if compression is not None else [v.value for v in variables]

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        if compression is not None:
            tape = dgc.DistributedGradientTape(tape, compression=compression)
        else:
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), variables, strict=True))

    for number, (x, y) in enumerate(_batches(rank.steps)):
        rank.begin(number)
        step(x, y)
        if rank.fault.where == "outside" and _is_time(rank):
            _save(rank, model, optimizer, compression)
            return True
    return False


def _save(rank: Rank, model: Any, optimizer: Any, compression: Any) -> None:
    folder = rank.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    if compression is not None:
        compression.average(optimizer)
    if hvd.rank() == 0:
        model.save_weights(folder / "model.weights.h5")
        if compression is not None:
            save_state(folder / "dgc.npz", compression.state_dict())
    rank.saved()


if __name__ == "__main__":
    run(train)
