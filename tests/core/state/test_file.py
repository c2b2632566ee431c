"""The file of one rank's state: whole or not at all, and one clear error where it is something else."""

from __future__ import annotations

import errno
import json
import zipfile

import numpy as np
import pytest

from dgc.core.state import file as state_file
from dgc.core.state.file import load_state, save_state
from dgc.errors import LayoutError, TransportError

STATE = {"format": 1, "step": 3, "names": ["a"], "parameters": {"a": {"u": np.arange(500.0), "v": np.ones(500)}}}


@pytest.fixture
def path(tmp_path):
    save_state(tmp_path / "states" / "a.npz", STATE)
    return tmp_path / "states" / "a.npz"


def test_a_state_comes_back(path):
    found = load_state(path)
    np.testing.assert_array_equal(found["parameters"]["a"]["u"], STATE["parameters"]["a"]["u"])
    assert (found["step"], found["names"]) == (3, ["a"])


def flipped(path):
    data = bytearray(path.read_bytes())
    place = data.find(STATE["parameters"]["a"]["u"][100:110].tobytes())
    assert place > 0
    data[place + 9] ^= 4
    return bytes(data)


def archive_of(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        lambda path: b"",
        lambda path: path.read_bytes()[:-200],
        lambda path: path.read_bytes()[:20],
        flipped,
        lambda path: b"no archive at all",
        lambda path: archive_of(path, u=np.ones(3)),
        lambda path: archive_of(path, header=np.frombuffer(b"{no json", np.uint8)),
        lambda path: archive_of(path, header=np.frombuffer(json.dumps({"__array__": "gone"}).encode(), np.uint8)),
    ],
    ids=["empty", "cut off", "cut off early", "a bit flipped", "text", "other archive", "no json", "array missing"],
)
def test_a_file_that_cannot_be_read_is_named(path, content):
    path.write_bytes(content(path))
    with pytest.raises(LayoutError, match=r"a\.npz is no state of a compressor"):
        load_state(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"b\.npz is missing; put"):
        load_state(path.with_name("b.npz"))


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["write", "flush"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch, place):
    if place == "write":
        monkeypatch.setattr(state_file.np, "savez", full)
    else:
        monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(TransportError, match=r"a\.npz could not be written: No space left on device; what was saved"):
        save_state(path, {**STATE, "step": 4})
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]
    assert load_state(path)["step"] == 3


def test_a_save_that_another_rank_refuses_leaves_the_old_file(path):
    def refuse():
        assert zipfile.is_zipfile(path.with_name("a.npz.part"))
        raise RuntimeError("rank 1 could not")

    with pytest.raises(RuntimeError, match="rank 1"):
        save_state(path, {**STATE, "step": 4}, refuse)
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]
    assert load_state(path)["step"] == 3
