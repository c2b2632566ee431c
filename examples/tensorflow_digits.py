"""Train a small CNN on scanned digits in a custom TensorFlow loop with Horovod, dense or with compressed gradients.

    horovodrun -np 2 python examples/tensorflow_digits.py                       # sends 0.1 % of each gradient
    horovodrun -np 2 python examples/tensorflow_digits.py --compression none    # plain Horovod

It is an ordinary Horovod script. This is all that turns compression on; the optimizer's own line stays as it is:

     import horovod.tensorflow as hvd
    +import dgc.tensorflow as dgc
     ...
     optimizer = keras.optimizers.SGD(lr, momentum=0.9)
    +compression = dgc.Compression.dgc(optimizer=optimizer, sparsity=0.999)
     ...
    -    tape = hvd.DistributedGradientTape(tape)
    +    tape = dgc.DistributedGradientTape(tape, compression=compression)
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

import dgc.tensorflow as dgc


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
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = getattr(dgc.Compression, args.compression)
    if args.compression not in ("none", "fp16"):
        compression = compression(optimizer=optimizer, **options(args, steps))

    variables = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in model.trainable_variables]
    hvd.broadcast_variables(variables, root_rank=0)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        tape = dgc.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    began = time.perf_counter()
    for images, labels in make_dataset(train, args):
        train_step(images, labels)
    seconds = time.perf_counter() - began
    report(args, model, compression, steps, seconds, test)


if __name__ == "__main__":
    main()
