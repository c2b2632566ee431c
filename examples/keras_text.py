"""A small network with an embedding reads Python's manual byte by byte: AdamW and ``steps=`` in Keras.

    horovodrun -np 2 python examples/keras_text.py [steps]

The gradient of ``keras.layers.Embedding`` is sparse. ``sparse_as_dense=True`` says that its dense form may be
compressed; without it the same happens, with a warning.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import dgc.tensorflow.keras as dgc

STEPS, BATCH, LENGTH, WIDTH = 300, 16, 64, 64
keras = tf.keras


def make_model() -> keras.Model:
    """Predicts each next byte of (batch, length) bytes."""
    layers, text = keras.layers, keras.Input((LENGTH,), dtype="int32")
    read = layers.Conv1D(WIDTH, 3, padding="causal")(layers.Embedding(256, WIDTH)(text))
    for _ in range(2):
        normed = layers.LayerNormalization()(read)
        read = layers.Add()([read, layers.MultiHeadAttention(4, WIDTH // 4)(normed, normed, use_causal_mask=True)])
        normed = layers.LayerNormalization()(read)
        read = layers.Add()([read, layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normed))])
    return keras.Model(text, layers.Dense(256)(read))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    hvd.init()
    keras.utils.set_random_seed(0)
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(hvd.rank()).integers(len(text) - LENGTH - 1, size=(steps * BATCH, 1))
    windows = text[starts + np.arange(LENGTH + 1)]

    model = make_model()
    optimizer = dgc.DistributedOptimizer(
        keras.optimizers.AdamW(3e-3), compression=dgc.Compression.dgc(steps=steps), sparse_as_dense=True
    )
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    broadcast = dgc.callbacks.BroadcastGlobalVariablesCallback(0)
    history = model.fit(
        windows[:, :-1], windows[:, 1:], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[broadcast]
    )
    if hvd.rank() == 0:
        ratio = model.optimizer.compression.stats.total.ratio
        print(f"mean loss of {steps} steps {history.history['loss'][-1]:.3f}, {ratio:.0f} times fewer bytes")


if __name__ == "__main__":
    main()
