"""Train a small CNN on scanned digits with Keras' fit and Horovod, dense or with compressed gradients.

    horovodrun -np 2 python examples/keras_digits.py                       # sends 0.1 % of each gradient
    horovodrun -np 2 python examples/keras_digits.py --compression none    # the same without compression

The same file runs under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under legacy Keras. What a Horovod script changes:

    -import horovod.tensorflow.keras as hvd_keras
    +import dgc.tensorflow.keras as dgc
     ...
     optimizer = keras.optimizers.SGD(lr, momentum=0.9)
    -optimizer = hvd_keras.DistributedOptimizer(optimizer)
    +optimizer = dgc.DistributedOptimizer(optimizer, compression=dgc.Compression.dgc(sparsity=0.999))
     model.compile(optimizer=optimizer, ...)
    -model.fit(..., callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    +model.fit(..., callbacks=[dgc.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import time

import horovod.tensorflow as hvd
import tensorflow as tf
from _tensorflow_digits import (
    LearningRate,
    load_images,
    make_dataset,
    make_model,
    options,
    parse_arguments,
    report,
    steps_per_epoch,
)

import dgc.tensorflow.keras as dgc


def main() -> None:
    """Train, and report accuracy and bytes."""
    args = parse_arguments(__doc__.splitlines()[0])
    hvd.init()
    # One core for each process: they share this machine.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(args.seed)

    train, test = load_images()
    model = make_model()
    steps = args.epochs * steps_per_epoch(args)
    optimizer = tf.keras.optimizers.SGD(
        LearningRate(args.lr, args.warmup_epochs * steps_per_epoch(args), steps),
        momentum=args.momentum,
        nesterov=args.nesterov,
        weight_decay=args.weight_decay,
    )
    compression = getattr(dgc.Compression, args.compression)
    if args.compression not in ("none", "fp16"):
        compression = compression(**options(args, steps))
    model.compile(
        optimizer=dgc.DistributedOptimizer(optimizer, compression=compression),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    callbacks = [dgc.callbacks.BroadcastGlobalVariablesCallback(0), dgc.callbacks.MetricAverageCallback()]

    began = time.perf_counter()
    model.fit(
        make_dataset(train, args),
        steps_per_epoch=steps_per_epoch(args),
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    )
    seconds = time.perf_counter() - began
    report(args, model, compression, steps, seconds, test)


if __name__ == "__main__":
    main()
