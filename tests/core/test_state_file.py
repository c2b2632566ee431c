"""A state in a file: what was saved is what is read, and whatever else lies there is refused by name."""

import errno
import io
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dgc.core import state_file
from dgc.core.state_file import load_state, save_state
from dgc.errors import LayoutError, TransportError

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5)
ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.uint8, np.int64]), hnp.array_shapes(min_dims=0, min_side=0)
)
STATES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        PLAIN | ARRAYS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_size=4,
)


def content(state):
    """What makes two states the same: types, the order of keys, and the bits of arrays."""
    if isinstance(state, np.ndarray):
        return state.dtype, state.shape, state.tobytes()
    if isinstance(state, dict):
        return dict, [(key, content(value)) for key, value in state.items()]
    if isinstance(state, list):
        return list, [content(value) for value in state]
    return type(state), state


@settings(max_examples=30)
@given(state=STATES)
@example(state={"u": [np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)], "rate": float("inf")})
def test_what_was_saved_is_read(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "rank0.npz"
    save_state(path, state)
    assert content(load_state(path)) == content(state)


def test_scalars_of_numpy_and_tuples_come_back_as_plain_values(tmp_path):
    save_state(tmp_path / "s", {"step": np.int64(3), "shapes": ((2, 3), ())})
    assert content(load_state(tmp_path / "s")) == content({"step": 3, "shapes": [[2, 3], []]})


def test_the_folder_is_made_and_the_name_kept(tmp_path):
    path = tmp_path / "a" / "b" / "rank 0"
    save_state(path, {})
    assert [file.name for file in path.parent.iterdir()] == ["rank 0"]


def of_numpy(save, *arguments, **arrays):
    file = io.BytesIO()
    save(file, *arguments, **arrays)
    return file.getvalue()


FOREIGN = {
    "nothing": b"",
    "a text": b"{}",
    "a pickle": b"\x80\x04}\x94.",
    "one array": of_numpy(np.save, np.ones(3)),
    "arrays": of_numpy(np.savez, u=np.ones(3)),
    "arrays, one of them a header": of_numpy(np.savez, header=np.ones(3)),
    "the beginning of a state": of_numpy(np.savez, header=np.ones(3))[:40],
    "a state whose array is missing": of_numpy(np.savez, header=np.frombuffer(b'{"u": {"__array__": "u"}}', np.uint8)),
    "a state with a wrong byte": of_numpy(
        np.savez, u=np.ones(999), header=np.frombuffer(b'{"u": {"__array__": "u"}}', np.uint8)
    ).replace(b"\xf0\x3f", b"\xf0\x3e", 1),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_another_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(LayoutError, match=r"other.npz is no state of a compressor, or damaged; give the file"):
        load_state(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="none is missing; give the file"):
        load_state(tmp_path / "none")


@pytest.mark.parametrize(("module", "function"), [("np", "savez"), ("os", "fsync")])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, module, function):
    path = tmp_path / "a.npz"
    save_state(path, {"step": 3})
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(getattr(state_file, module), function, full)
    with pytest.raises(TransportError, match=r"a\.npz could not be written: No space left on device; what was saved"):
        save_state(path, {"step": 4})
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]
    assert load_state(path)["step"] == 3


def test_a_folder_that_is_a_file_is_an_error_that_names_the_place(tmp_path):
    (tmp_path / "file").write_text("something else")
    with pytest.raises(TransportError, match=r"file/state could not be written: .*save elsewhere"):
        save_state(tmp_path / "file" / "state", {"step": 1})
