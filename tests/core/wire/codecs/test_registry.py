"""Codecs by name and by number; the choice of the smallest; what importing the package loads."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.core import codecs
from dgc.core.codecs import IndexCodecId, ValueCodecId
from dgc.errors import ConfigError


def test_numbers_are_fixed():
    # Part of the format: a change here breaks hosts that run another release.
    assert {member.name: int(member) for member in IndexCodecId} == {
        "NONE": 0,
        "INT32": 1,
        "UINT16": 2,
        "ELIAS_FANO": 3,
    }
    assert {member.name: int(member) for member in ValueCodecId} == {
        "NONE": 0,
        "FLOAT32": 1,
        "FLOAT16": 2,
        "BFLOAT16": 3,
        "INT8": 4,
        "SIGN": 5,
        "FLOAT64": 6,
        "INT2": 7,
        "INT3": 8,
    }


def test_every_number_has_its_codec_and_names_lead_to_it():
    assert len(codecs.index_codec_names()) == len(IndexCodecId) - 1
    assert len(codecs.value_codec_names()) == len(ValueCodecId) - 1
    for name in codecs.index_codec_names():
        codec = codecs.index_codec(name)
        assert codec.name == IndexCodecId(codec.id).name.lower() == name
        assert isinstance(codec, codecs.IndexCodec)
    for name in codecs.value_codec_names():
        codec = codecs.value_codec(name)
        assert codec.name == ValueCodecId(codec.id).name.lower() == name
        assert isinstance(codec, codecs.ValueCodec)


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(ConfigError, match=r"indices='rice' is unknown.*'int32', 'uint16', 'elias_fano'"):
        codecs.index_codec("rice")
    with pytest.raises(ConfigError, match=r"indices='rice' is unknown.*'elias_fano', 'auto'"):
        codecs.resolve_index_codec("rice", 100, 10)
    with pytest.raises(ConfigError, match=r"values='fp16' is unknown.*'float16'.*'sign'"):
        codecs.value_codec("fp16")


class TwoBytes(type(codecs.index_codec("int32"))):
    """An index codec of a user's own, smaller than any of this package."""

    id, name = 128, "two_bytes"

    def max_bytes(self, n, k):
        return 0


@pytest.fixture
def two_bytes():
    codec = TwoBytes()
    codecs.register_codec("indices", codec)
    yield codec
    del codecs._INDEX_CODECS[codec.name]


def test_a_registered_index_codec_is_taken_by_its_name_alone(two_bytes):
    assert codecs.resolve_index_codec("two_bytes", 100, 10) is two_bytes
    assert "two_bytes" in codecs.index_codec_names()
    assert codecs.smallest_index_codec.__wrapped__(100, 10).name in {"int32", "uint16", "elias_fano"}


@pytest.mark.parametrize(
    ("option", "changes", "said"),
    [
        ("codec", {}, "option 'codec'; choose one of indices, values"),
        ("values", {}, "no ValueCodec: it lacks grouped, dtype"),
        ("indices", {"name": "two_bytes"}, "number 129 collides with 'two_bytes', which has number 128"),
        ("indices", {"name": "int32"}, "'int32' with number 129 collides with 'int32', which has number 1; names"),
        ("indices", {"id": 128}, "'other' with number 128 collides with 'two_bytes'"),
        ("indices", {"id": 7}, "number 7; allowed: 128 to 255"),
        ("indices", {"id": 256}, "number 256; allowed: 128 to 255"),
        ("indices", {"name": "auto"}, "cannot be named 'auto'"),
        ("indices", {"name": "two bytes"}, "cannot be named 'two bytes'"),
        ("indices", {"name": 5}, "cannot be named 5"),
    ],
)
def test_a_codec_that_does_not_fit_is_refused(two_bytes, option, changes, said):
    other = TwoBytes()
    other.id, other.name = 129, "other"
    vars(other).update(changes)
    before = codecs.index_codec_names(), codecs.value_codec_names()
    with pytest.raises(ConfigError, match=re.escape(said)):
        codecs.register_codec(option, other)
    assert (codecs.index_codec_names(), codecs.value_codec_names()) == before


@pytest.mark.parametrize(
    ("density", "name"), [(0.001, "elias_fano"), (0.01, "elias_fano"), (0.0625, "elias_fano"), (0.25, "elias_fano")]
)
def test_auto_at_the_densities_of_a_warm_up(density, name):
    n = 6_500_000
    assert codecs.resolve_index_codec("auto", n, int(n * density)).name == name


@given(st.integers(0, 1 << 34), st.data())
def test_auto_is_never_beaten(n, data):
    k = data.draw(st.integers(0, n))
    chosen = codecs.smallest_index_codec(n, k)
    for codec in map(codecs.index_codec, codecs.index_codec_names()):
        if n < codec.LIMIT:
            assert chosen.max_bytes(n, k) <= codec.max_bytes(n, k)


def test_auto_beyond_every_codec_is_an_error():
    with pytest.raises(ConfigError, match="bucket_bytes"):
        codecs.smallest_index_codec(1 << 48, 10)
    with pytest.raises(ConfigError, match="11 entries cannot be chosen from 10 elements"):
        codecs.smallest_index_codec(10, 11)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)


def test_import_is_light():
    heavy = "numba", "cupy", "torch", "tensorflow", "mpi4py", "horovod"
    code = f"import sys, dgc.core.codecs; print([name for name in {heavy!r} if name in sys.modules])"
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr
