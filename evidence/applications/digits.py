"""What the two image applications share: the images, their order and augmentation, the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evidence.application import Metric, Scale
from evidence.data.augment import shifted
from evidence.data.images import digits, prepare_digits


@dataclass(frozen=True)
class Size:
    """How large a training is."""

    width: int
    """Channels of the first stage; the others have twice and four times as many."""
    blocks: int
    """Of each stage."""
    images: int
    """The most that are trained on."""
    batch: int
    """Images a step, of all ranks together."""
    epochs: int
    rampup_epochs: int
    tested: int
    """The most that are tested on."""


SIZES: dict[Scale, Size] = {
    "full": Size(20, 3, 8000, 64, 14, 2, 2000),
    "quick": Size(16, 1, 2000, 64, 4, 1, 1000),
    "tiny": Size(8, 1, 256, 32, 3, 1, 100),
}


class DigitsTraining:
    """The members of an application that do not depend on the framework."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "higher", percent=True),
        Metric("test loss", "lower"),
    )
    ranks: ClassVar[int] = 4
    lr: ClassVar[float] = 0.1
    clip: float | None = None

    def __init__(self, scale: Scale, seed: int) -> None:
        """Load the images."""
        self.scale, self.seed = scale, seed
        self._size = SIZES[scale]
        self.epochs, self.rampup_epochs = self._size.epochs, self._size.rampup_epochs
        found = digits()
        self._source = str(found["source"])
        self.train_images = found["train_images"][: self._size.images]
        self.train_labels = found["train_labels"][: self._size.images]
        self.test_images = found["test_images"][: self._size.tested]
        self.test_labels = found["test_labels"][: self._size.tested]

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed; the images come with scikit-learn where there is no npm."""
        return None

    @classmethod
    def prepare(cls, scale: Scale) -> None:
        """Build the images into the cache."""
        prepare_digits()

    def facts(self) -> dict[str, str]:
        """What the page says."""
        size = self._size
        return {
            "data": f"{self._source}: {len(self.train_images):,} to train on, moved by up to two pixels and half of "
            f"them with a square of 6x6 erased, {len(self.test_images):,} to test on",
            "model": f"a residual network of {6 * size.blocks + 2} layers with {size.width}, {2 * size.width} and "
            f"{4 * size.width} channels and batch normalisation",
            "training": f"SGD with momentum 0.9 and weight decay, batches of {size.batch} on all ranks together, "
            f"{size.epochs} epochs, a learning rate of {self.lr:g}, a tenth of it from half of them on and a hundredth "
            "from three quarters on",
        }

    def rate(self, progress: float) -> float:
        """Two steps down, after a short rise."""
        rise = min(1.0, 0.1 + progress * self.epochs)
        return rise * (1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01)

    def steps(self, size: int) -> int:
        """Steps of an epoch."""
        return len(self.train_images) // self._size.batch

    def array_batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This rank's share of an epoch: images (b, 28, 28) float32, labels (b,) int64."""
        # All ranks draw the same order and take their own part of each batch.
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.train_images))
        random = np.random.default_rng([self.seed, epoch, rank])
        own = self._size.batch // size
        for step in range(self.steps(size)):
            start = step * self._size.batch + rank * own
            chosen = order[start : start + own]
            yield shifted(self.train_images[chosen], random), self.train_labels[chosen]
