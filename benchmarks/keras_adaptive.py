r"""Train with Keras 3 and AdamW on two tasks: the loss, the bytes, and the processor time of a rank.

    horovodrun -np 2 python benchmarks/keras_adaptive.py text 400 dense classic auto --seeds 1 2 --json FILE

``text`` is an embedding and an LSTM that read Python's standard library byte by byte; ``digits`` is a CNN on the digits
of scikit-learn. ``auto`` is ``Compression.dgc(steps=...)`` as it is, and ``classic`` has this error feedback. Equal
steps, rates and data for all. The loss is that of held-out data, of rank 0.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from machine import facts, one_item_a_line

import dgc.tensorflow.keras as dgc

LENGTH, SEQUENCES = 32, 16  # of the text, and sequences of a rank in a step


def text(steps: int, generator: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return the model, the rank's data for all steps, and held-out data."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = np.concatenate([np.frombuffer(file.read_bytes(), np.uint8) for file in files])
    cut = len(whole) * 9 // 10

    def rows(part: np.ndarray, count: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        begins = draws.integers(0, len(part) - LENGTH - 1, count)
        found = np.stack([part[begin : begin + LENGTH + 1] for begin in begins]).astype("int32")
        return found[:, :-1], found[:, 1:]

    model = keras.Sequential(
        [keras.layers.Embedding(256, 64), keras.layers.LSTM(192, return_sequences=True), keras.layers.Dense(256)]
    )
    model.build((None, LENGTH))
    return model, rows(whole[:cut], steps * SEQUENCES, generator), rows(whole[cut:], 512, np.random.default_rng(99))


def digits(steps: int, generator: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return the model, the rank's data for all steps, and held-out data."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    drawn = generator.integers(0, 1400, steps * SEQUENCES)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    return model, (images[drawn], labels[drawn]), (images[1400:], labels[1400:])


TASKS = {"text": (text, 3e-3), "digits": (digits, 1e-3)}


def train(task: str, steps: int, word: str, seed: int) -> dict[str, Any]:
    """Train once, and return the row of rank 0."""
    keras.utils.set_random_seed(seed)
    make, rate = TASKS[task]
    model, data, held = make(steps, np.random.default_rng((seed, hvd.rank())))
    given: dict[str, Any] = {"error_feedback": "classic"} if word == "classic" else {}
    compression = None if word == "dense" else dgc.Compression.dgc(steps=steps, **given)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.1)
    optimizer = dgc.DistributedOptimizer(keras.optimizers.AdamW(schedule), compression=compression)
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [dgc.callbacks.BroadcastGlobalVariablesCallback(0)]
    processor = time.process_time()
    model.fit(*data, batch_size=SEQUENCES, shuffle=False, verbose=0, callbacks=callbacks)
    processor = time.process_time() - processor
    size = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    dense = 4 * size * steps
    row = {
        "setting": word,
        "seed": seed,
        "steps": steps,
        "parameters": size,
        "loss": float(model.evaluate(*held, batch_size=64, verbose=0)),
        "fewer": dense / compression.stats.total.bytes_sent if compression else 1.0,
        "processor": processor / steps,
    }
    if compression:
        compression.close()
    return row


def main() -> None:
    """Train with each word and seed, and write rank 0's rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("steps", type=int)
    parser.add_argument("words", nargs="+", choices=["dense", "classic", "auto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    rows = []
    for seed in arguments.seeds:
        for word in arguments.words:
            rows.append(train(arguments.task, arguments.steps, word, seed))
            if hvd.rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    if hvd.rank() == 0 and arguments.json:
        found = {
            "task": arguments.task,
            "ranks": hvd.size(),
            **facts("tensorflow-cpu", "keras", "horovod", "numpy"),
            "rows": rows,
        }
        arguments.json.write_text(one_item_a_line(found))


if __name__ == "__main__":
    main()
