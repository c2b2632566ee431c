"""The TensorFlow lines that docs/elsewhere.md shows, completed with a small model, on two ranks."""

import pytest

pytest.importorskip("tensorflow")

LINES = """
import numpy as np
import tensorflow as tf
from documented import shown
from worker_tools import report

build, tape, minimize, of_their_own, fit = shown("elsewhere.md", "Paddle's lines in TensorFlow")
exec(build.replace("num_trainers=4", "num_trainers=2"))


def new_model():
    model = tf.keras.Sequential([tf.keras.layers.Dense(128), tf.keras.layers.Dense(1)])
    model.build((None, 128))
    return model


model = new_model()
images = np.random.default_rng(hvd.rank()).normal(size=(16, 128)).astype(np.float32)
labels = np.ones((16, 1), np.float32)
loss_function = tf.keras.losses.MeanSquaredError()
exec(tape)
variables, by_function, with_tape = minimize.splitlines()
exec(variables)
exec(by_function)
with tf.GradientTape() as tape:
    loss = loss_function(labels, model(images))
exec(with_tape)
with tf.GradientTape() as tape:
    loss = loss_function(labels, model(images))
gradients = tape.gradient(loss, variables)
exec(of_their_own)
steps = optimizer.compression.describe()["step"]
first = [v.numpy() for v in model.trainable_variables]
model = new_model()
exec(fit.replace("loss=...", "loss='mse'"))
ends = hvd.allgather_object([first, [v.numpy() for v in model.trainable_variables]])
same = all(np.array_equal(a, b) for one, two in zip(*ends) for a, b in zip(one, two))
report([steps, int(model.optimizer.iterations), same])
"""


@pytest.mark.mpi
def test_paddles_lines(ranks):
    assert ranks.run(LINES, 2).values == [[3, 1, True]] * 2
