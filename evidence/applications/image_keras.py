"""Image classification in Keras 3: the network and training of ``image``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from evidence.applications.digits import SIZES, DigitsTraining


def resnet(width: int, blocks: int) -> Any:
    """Logits (n, 10) of images (n, 28, 28, 1)."""
    from keras import Input, Model, layers

    def convolution(x: Any, outside: int, size: int, stride: int) -> Any:
        x = layers.Conv2D(outside, size, stride, padding="same", use_bias=False, kernel_initializer="he_uniform")(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    given = Input((28, 28, 1))
    x = layers.ReLU()(convolution(given, width, 3, 2))
    for stage in range(3):
        outside = width << stage
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            inner = convolution(layers.ReLU()(convolution(x, outside, 3, stride)), outside, 3, 1)
            shortcut = x if stride == 1 and x.shape[-1] == outside else convolution(x, outside, 1, stride)
            x = layers.ReLU()(layers.add([inner, shortcut]))
    return Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


class ImageKeras(DigitsTraining):
    """See ``evidence.application.Application``."""

    name: ClassVar[str] = "image_keras"
    title: ClassVar[str] = "Image classification, Keras 3"
    framework: ClassVar[Literal["torch", "keras"]] = "keras"

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed. Keras is imported where it is used: the launcher does without it."""
        if importlib.util.find_spec("tensorflow") is None:
            return "TensorFlow is missing: install it (make setup installs everything)"
        return None

    def make_model(self) -> Any:
        """A new network."""
        size = SIZES[self.scale]
        return resnet(size.width, size.blocks)

    def make_optimizer(self, model: Any) -> Any:
        """Momentum SGD. Keras' weight decay has no momentum: ten times as large it is as strong as PyTorch's."""
        from keras.optimizers import SGD

        return SGD(self.lr, momentum=0.9, weight_decay=5e-3)

    def batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[Any, ...]]:
        """This rank's share of the epoch's batches: images (b, 28, 28, 1), labels (b,)."""
        for images, labels in self.array_batches(epoch, rank, size):
            yield images[..., None], labels

    def loss(self, model: Any, batch: tuple[Any, ...]) -> Any:
        """Mean cross entropy."""
        from keras import losses, ops

        targets, outputs = batch
        return ops.mean(losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True))

    def evaluate(self, model: Any, rank: int, size: int) -> dict[str, tuple[float, float]]:
        """Right answers among this rank's test images, and the sum of their losses."""
        images, labels = self.test_images[rank::size, :, :, None], self.test_labels[rank::size]
        logits = np.concatenate(
            [np.asarray(model.predict_on_batch(images[at : at + 250])) for at in range(0, len(images), 250)]
        )
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
        right = float((logits.argmax(1) == labels).sum())
        return {"accuracy": (right, len(labels)), "test loss": (float(losses.sum()), len(labels))}
