"""Code that both TensorFlow examples use: the data, the network, the command line and the report.

The data are 1797 real scans of handwritten digits, 8x8 pixels. The first half trains the network and the second half
tests it. They are not shuffled: neighbours tend to be from the same hand, so shuffling would make it easier.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from dgc.core.compressors import compressor_names

TRAIN_IMAGES = 898
PAPER_WARMUP = [0.75, 0.9375, 0.984375, 0.996, 0.999]

Arrays = tuple[np.ndarray, np.ndarray]


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images")
    # At 99.9 % a weight is sent once in a thousand steps, so a training of a thousand steps says little about DGC. Half
    # the batch and half the learning rate are twice the steps over as many images, for dense training as for DGC.
    parser.add_argument("--batch-size", type=int, default=8, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank; multiplied by their number")
    parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum")
    parser.add_argument(
        "--weight-decay", type=float, default=1e-3, help="SGD weight decay (decoupled, as Keras has it)"
    )
    parser.add_argument("--nesterov", action="store_true", help="Nesterov momentum")
    parser.add_argument("--warmup-epochs", type=float, default=2, help="the learning rate rises over these epochs")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the initial weights, the shuffling and the augmentation"
    )
    parser.add_argument(
        "--compression", choices=("none", "fp16", *compressor_names()), default="dgc", help="how gradients travel"
    )
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="an option of the compressor"
    )
    parser.add_argument(
        "--sparsity", type=float, nargs="+", help="share of entries held back; dgc: the paper's warm-up to 0.999"
    )
    parser.add_argument("--rampup-begin-step", type=int, default=0, help="first compressed step")
    parser.add_argument("--rampup-step", type=int, default=0, help="steps of ramp-up; 0: an eighth of all steps")
    parser.add_argument("--drop-residual", action="store_true", help="control experiment: forget what was not sent")
    parser.add_argument("--json", metavar="OUT", help="write the results to this file")
    return parser.parse_args()


def load_images() -> tuple[Arrays, Arrays]:
    """The training and the test images, (N, 8, 8, 1) float32 in [0, 1], with their labels."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    return (images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES]), (images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])


def make_model() -> Any:
    """Two convolutions and two dense layers; 99.8 % of its 284 000 parameters are in three large tensors."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.build((None, 8, 8, 1))
    return model


def make_dataset(train: Arrays, args: argparse.Namespace) -> tf.data.Dataset:
    """This rank's share of each epoch's shuffled images, augmented, in batches of equal size.

    Every rank gets the same number of batches: a rank that stops earlier would leave the others waiting.
    """
    images, labels = train
    share = len(images) // hvd.size() // args.batch_size * args.batch_size

    def epoch_of_one_rank(epoch: int) -> Any:
        # All ranks shuffle alike and take every size-th image.
        order = np.random.default_rng([args.seed, epoch]).permutation(len(images))[hvd.rank() :: hvd.size()][:share]
        random = np.random.default_rng([args.seed, epoch, hvd.rank()])
        return augment(images[order], random), labels[order]

    def generate() -> Any:
        for epoch in range(args.epochs):
            shuffled, classes = epoch_of_one_rank(epoch)
            for start in range(0, share, args.batch_size):
                yield shuffled[start : start + args.batch_size], classes[start : start + args.batch_size]

    signature = (
        tf.TensorSpec((args.batch_size, 8, 8, 1), tf.float32),
        tf.TensorSpec((args.batch_size,), tf.int64),
    )
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def steps_per_epoch(args: argparse.Namespace) -> int:
    """Batches of one rank in one epoch."""
    return TRAIN_IMAGES // hvd.size() // args.batch_size


def augment(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Turn each image by up to 15 degrees, scale it by up to 10 %, and shift it by up to one pixel."""
    angle, scale, dx, dy = random.uniform(-1, 1, (4, len(images)))
    angle, scale = angle * math.radians(15), 1 + 0.1 * scale
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    # Rows of [a b c; d e f; 0 0 1] that map an output pixel to an input pixel, about the middle (3.5, 3.5).
    offset_x, offset_y = 3.5 - 3.5 * cos + 3.5 * sin + dx, 3.5 - 3.5 * sin - 3.5 * cos + dy
    zero = np.zeros_like(cos)
    transforms = np.stack([cos, -sin, offset_x, sin, cos, offset_y, zero, zero], axis=1)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=transforms.astype(np.float32),
        output_shape=[8, 8],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    ).numpy()


class LearningRate(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Horovod's linear warm-up from lr to lr * size, then a cosine down to 0."""

    def __init__(self, lr: float, warmup: float, steps: int) -> None:
        """Rise for ``warmup`` of ``steps`` steps.

        Args:
            lr: learning rate of one rank.
            warmup: steps of the rise.
            steps: all steps.
        """
        super().__init__()
        self.lr, self.warmup, self.steps, self.size = lr, warmup, steps, hvd.size()

    def __call__(self, step: Any) -> tf.Tensor:
        """The learning rate of ``step``."""
        step = tf.cast(step, tf.float32)
        rising = 1 + (self.size - 1) * step / max(1.0, self.warmup)
        falling = self.size * 0.5 * (1 + tf.cos(math.pi * (step - self.warmup) / max(1.0, self.steps - self.warmup)))
        return self.lr * tf.where(step < self.warmup, rising, falling)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves with the model."""
        return {"lr": self.lr, "warmup": self.warmup, "steps": self.steps}


def options(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Keyword options of the compressor."""
    chosen: dict[str, Any] = {"rampup_begin_step": args.rampup_begin_step}
    if args.compression == "dgc" or args.sparsity:
        chosen.update(sparsity=args.sparsity or PAPER_WARMUP, rampup_step=rampup_steps(args, steps))
    if args.drop_residual:
        chosen["error_feedback"] = False
    chosen.update(args.option)
    return chosen


def option(text: str) -> tuple[str, Any]:
    """``name=value``, the value as Python writes it, or a word."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def rampup_steps(args: argparse.Namespace, steps: int) -> int:
    """Steps over which the sparsity rises."""
    return args.rampup_step or max(1, steps // 8)


def report(args: argparse.Namespace, model: Any, compression: Any, steps: int, seconds: float, test: Arrays) -> None:
    """Evaluate, compare the replicas, and print (and write) the results."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in test)
    logits = model(images, training=False).numpy()
    own = float((logits.argmax(1) == labels).sum())
    correct = hvd.allreduce(tf.constant(own, tf.float64), op=hvd.Sum, name="correct").numpy()
    weights = [np.asarray(w) for w in model.get_weights()]
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).digest()
    replicas = hvd.allgather(tf.constant([list(digest)], tf.uint8), name="digests").numpy()
    numel = sum(w.size for w in weights)
    last = total = sparsified = 0
    if hvd.size() > 1:
        if args.compression not in ("none", "fp16"):
            last, total = compression.stats.last.bytes_sent, compression.stats.total.bytes_sent
            sparsified = compression.stats.last.sparse_elements
        else:
            last = numel * (2 if args.compression == "fp16" else 4)
            total = last * steps
    results = {
        "ranks": hvd.size(),
        "compression": args.compression,
        "accuracy": correct / len(test[1]),
        "seconds": seconds,
        "steps": steps,
        "replicas_identical": bool((replicas == replicas[:1]).all()),
        "rampup_ends": args.rampup_begin_step + rampup_steps(args, steps),
        "parameters": numel,
        "parameters_sparsified": sparsified,
        "dense_bytes_per_step": 4 * numel if hvd.size() > 1 else 0,
        "bytes_last_step": last,
        "bytes_total": total,
    }
    if hvd.rank() == 0:
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=2)
        print(
            f"{args.compression} on {hvd.size()} ranks: test accuracy {results['accuracy']:.2%} after {steps} steps, "
            f"{seconds:.1f} s; bytes sent: {last:,} in the last step, {total:,} in all"
        )
