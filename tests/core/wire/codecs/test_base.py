"""Every value codec: the error bound of each, finite stays finite, and the sender knows what receivers read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.codecs import value_codec, value_codec_names
from dgc.errors import WireError

CODECS = [value_codec(name) for name in value_codec_names()]
LARGEST = float(np.finfo(np.float32).max)
TINIEST = 2.0**-149

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@st.composite
def entries(draw):
    """Values over the whole of float32 or near each other, and bounds of groups, some of them empty."""
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    scale = draw(st.sampled_from([None, 1e38, 1.0, 1e-5, 1e-30, 1e-38, 1e-43]))
    elements = anything if scale is None else st.floats(-scale, scale).map(np.float32).map(float)
    values = draw(arrays(np.float32, st.integers(0, 60), elements=elements))
    cuts = draw(st.lists(st.integers(0, values.size), max_size=6))
    return values, np.array([0, *sorted(cuts), values.size], np.int64)


def received(codec, values, bounds):
    """What a receiver reads; checks sizes and the bytes around on the way."""
    reserve = codec.max_bytes(values.size, bounds.size - 1)
    buffer = np.full(reserve + 48, 0xAA, np.uint8)
    original = values.copy()
    used = codec.encode(values, bounds, buffer[5 : 5 + reserve])
    assert used <= reserve
    assert used % 8 == 0
    assert (buffer[:5] == 0xAA).all()
    assert (buffer[5 + used :] == 0xAA).all()
    assert values.tobytes() == original.tobytes()
    buffer.flags.writeable = False
    decoded, consumed = codec.decode(buffer[5:], values.size, bounds)
    assert consumed == used
    assert decoded.dtype == codec.dtype
    assert decoded.flags.writeable
    assert not np.may_share_memory(decoded, buffer)
    return decoded


def groups_of(bounds):
    return [slice(*pair) for pair in itertools.pairwise(bounds) if pair[1] > pair[0]]


@codecs
@pytest.mark.filterwarnings("error")
@settings(deadline=None)
@given(case=entries())
@example(case=(np.zeros(5, np.float32), np.array([0, 5])))
@example(case=(np.zeros(0, np.float32), np.array([0])))
@example(case=(np.array([LARGEST, -LARGEST, TINIEST, 0.0], np.float32), np.array([0, 2, 2, 4])))
@example(case=(np.array([-TINIEST], np.float32), np.array([0, 0, 1, 1])))
@example(case=(np.array([LARGEST] * 40, np.float32), np.array([0, 40])))
def test_error_is_bounded_and_finite_stays_finite(codec, case):
    values, bounds = case
    values = values.astype(codec.dtype)
    decoded = received(codec, values, bounds).astype(np.float64)
    assert np.isfinite(decoded).all()
    exact = values.astype(np.float64)
    error = np.abs(decoded - exact)
    largest = np.abs(exact).max(initial=0.0)
    if codec.name in ("float32", "float64"):
        assert (error == 0).all()
    elif codec.name == "float16":
        assert (error <= np.maximum(np.abs(exact) * 2.0**-11, largest * 2.0**-39)).all()
    elif codec.name == "bfloat16":
        assert (error <= np.maximum(np.abs(exact) * 2.0**-8, 2.0**-134)).all()
    elif codec.name in ("int8", "int3"):
        levels = 2 ** (codec.bits - 1) - 1
        for group in groups_of(bounds):
            top = np.abs(exact[group]).max()
            assert (error[group] <= top * (1 / (2 * levels) + 1e-6) + TINIEST).all()
            assert (error[group][np.abs(exact[group]) == top] == 0).all()
    elif codec.name == "int2":
        for group in groups_of(bounds):
            magnitudes = np.abs(decoded[group])
            assert np.unique(magnitudes).size <= 2
            lost = abs(magnitudes.sum(dtype=np.float64) - np.abs(exact[group]).sum(dtype=np.float64))
            assert lost <= magnitudes.size * (magnitudes.max(initial=0) * 2.0**-23 + TINIEST)
        assert (np.sign(decoded) * np.sign(exact) >= 0).all()
    else:
        for group in groups_of(bounds):
            for members in (exact[group] < 0, exact[group] >= 0):
                assert np.unique(decoded[group][members]).size <= 1
                # The mean is rounded to float32 once: the sum over the class is kept to that precision.
                lost = abs(decoded[group][members].sum() - exact[group][members].sum())
                assert lost <= members.sum() * (np.abs(decoded[group][members]).max(initial=0) * 2.0**-23 + TINIEST)
        assert (np.sign(decoded) * np.sign(exact) >= 0).all()


@codecs
def test_empty_message(codec):
    for bounds in ([0], [0, 0], [0, 0, 0]):
        assert received(codec, np.zeros(0, codec.dtype), np.array(bounds)).size == 0


@codecs
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_nonfinite_without_a_warning(codec, bad):
    values = np.array([1.0, bad, -3.0, 2.0, 0.0], codec.dtype)
    bounds = np.array([0, 3, 5])
    decoded = received(codec, values, bounds)
    if codec.name == "sign":
        assert not np.isfinite(decoded[:3]).all()  # the mean of its class, or of both for NaN
    else:
        assert not np.isfinite(decoded[1])
    assert np.isfinite(decoded[3:]).all()


@codecs
def test_works_where_numpy_raises_on_floating_point_events(codec):
    values = np.array([1e38, 1e-44, -1e-38, 3.0], codec.dtype)
    with np.errstate(all="raise"):
        received(codec, values, np.array([0, 2, 4]))


@codecs
def test_neither_memory_order_nor_alignment_matters(codec):
    values = np.arange(40, dtype=codec.dtype)[::2]
    bounds = np.array([0, 7, 20])
    assert received(codec, values, bounds).tobytes() == received(codec, values.copy(), bounds).tobytes()


@codecs
@given(k=st.integers(0, 1 << 20), less=st.integers(0, 1000), groups=st.integers(0, 500))
def test_reserve_for_k_holds_fewer_entries_too(codec, k, less, groups):
    assert codec.max_bytes(max(k - less, 0), groups) <= codec.max_bytes(k, groups)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("float32", 32),
        ("float16", 16),
        ("bfloat16", 16),
        ("int8", 8),
        ("int3", 3),
        ("int2", 2),
        ("sign", 1),
        ("float64", 64),
    ],
)
def test_bits_per_entry(name, bits):
    k, groups = 25_000, 10
    used = 8 * value_codec(name).max_bytes(k, groups)
    assert bits * k <= used <= bits * k + 64 * (groups + 2)


@codecs
def test_truncation_at_every_length_is_an_error(codec):
    bounds = np.array([0, 4, 4, 19])
    out = np.empty(codec.max_bytes(19, 3), np.uint8)
    used = codec.encode(np.arange(19, dtype=codec.dtype) - 9, bounds, out)
    for length in range(used):
        with pytest.raises(WireError, match=f"{codec.name}: .*only {length} left"):
            codec.decode(out[:length], 19, bounds)


@codecs
def test_short_output_is_an_error_and_untouched(codec):
    values, bounds = np.ones(9, codec.dtype), np.array([0, 9])
    for short in range(codec.max_bytes(9, 1)):
        out = np.full(short, 0xAA, np.uint8)
        with pytest.raises(WireError, match="Size the message with max_bytes"):
            codec.encode(values, bounds, out)
        assert (out == 0xAA).all()


@codecs
def test_other_types_are_refused_not_cast(codec):
    other = np.float64 if codec.dtype == np.float32 else np.float32
    out = np.empty(1000, np.uint8)
    for values in (np.ones(3, other), np.ones(3, np.int32), np.ones((3, 1), codec.dtype)):
        with pytest.raises(WireError, match=f"{codec.name}: values are"):
            codec.encode(values, np.array([0, 3]), out)


@codecs
@pytest.mark.filterwarnings("error")
def test_damaged_blocks_are_refused_or_read_as_numbers(codec):
    rng = np.random.default_rng(5)
    bounds = np.array([0, 3, 3, 11])
    out = np.empty(codec.max_bytes(11, 3), np.uint8)
    used = codec.encode(rng.standard_normal(11).astype(codec.dtype), bounds, out)
    for _ in range(4000):
        damaged = out[:used].copy()
        where = rng.integers(used, size=rng.integers(1, 5))
        damaged[where] = rng.integers(256, size=where.size)
        damaged = damaged[: rng.integers(used - 8, used + 1)]
        try:
            values, consumed = codec.decode(damaged, 11, bounds)
        except WireError:
            continue
        assert values.shape == (11,)
        assert consumed == used
