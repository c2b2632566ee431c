"""Value codecs: the error bound of each, finite stays finite, and the sender knows what receivers read."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    IndexCodec,
    IndexCodecId,
    SparseCodec,
    ValueCodec,
    ValueCodecId,
    register_codec,
)
from dgc.core.layout import Bucket, Segment
from dgc.errors import ConfigError, WireError

CODECS = [VALUE_CODECS[member.name.lower()] for member in ValueCodecId if member]
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
    assert decoded.dtype == np.float32
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
    decoded = received(codec, values, bounds).astype(np.float64)
    assert np.isfinite(decoded).all()
    exact = values.astype(np.float64)
    error = np.abs(decoded - exact)
    if codec.name == "float32":
        assert (error == 0).all()
    elif codec.name == "float16":
        assert (error <= np.maximum(np.abs(exact) * 2.0**-11, np.abs(exact).max(initial=0.0) * 2.0**-39)).all()
    elif codec.name in ("int2", "int4"):
        for group in groups_of(bounds):
            magnitudes = np.abs(decoded[group])
            assert np.unique(magnitudes).size <= codec.scales
            lost = abs(magnitudes.sum(dtype=np.float64) - np.abs(exact[group]).sum(dtype=np.float64))
            assert lost <= magnitudes.size * (magnitudes.max(initial=0) * 2.0**-23 + TINIEST)
        assert (np.sign(decoded) * np.sign(exact) >= 0).all()
    else:
        levels = 2 ** (codec.bits - 1) - 1
        for group in groups_of(bounds):
            top = np.abs(exact[group]).max()
            assert (error[group] <= top * (1 / (2 * levels) + 1e-6) + TINIEST).all()
            assert (error[group][np.abs(exact[group]) == top] == 0).all()


@codecs
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_nonfinite_without_a_warning(codec, bad):
    decoded = received(codec, np.array([1.0, bad, -3.0, 2.0, 0.0], np.float32), np.array([0, 3, 5]))
    assert not np.isfinite(decoded[1])
    assert np.isfinite(decoded[3:]).all()


@codecs
def test_works_where_numpy_raises_on_floating_point_events(codec):
    with np.errstate(all="raise"):
        received(codec, np.array([1e38, 1e-44, -1e-38, 3.0], np.float32), np.array([0, 2, 4]))


@codecs
def test_truncation_at_every_length_is_an_error(codec):
    bounds = np.array([0, 4, 4, 19])
    out = np.empty(codec.max_bytes(19, 3), np.uint8)
    used = codec.encode(np.arange(19, dtype=np.float32) - 9, bounds, out)
    for length in range(used):
        with pytest.raises(WireError, match=f"{codec.name}: .*only {length} left"):
            codec.decode(out[:length], 19, bounds)


@codecs
def test_short_output_is_an_error_and_untouched(codec):
    values, bounds = np.ones(9, np.float32), np.array([0, 9])
    for short in range(codec.max_bytes(9, 1)):
        out = np.full(short, 0xAA, np.uint8)
        with pytest.raises(WireError, match="Size the message with max_bytes"):
            codec.encode(values, bounds, out)
        assert (out == 0xAA).all()


@codecs
@pytest.mark.filterwarnings("error")
def test_damaged_blocks_are_refused_or_read_as_numbers(codec):
    rng = np.random.default_rng(5)
    bounds = np.array([0, 3, 3, 11])
    out = np.empty(codec.max_bytes(11, 3), np.uint8)
    used = codec.encode(rng.standard_normal(11).astype(np.float32), bounds, out)
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


# -- float16 -------------------------------------------------------------------------------------------------------

HALVES = VALUE_CODECS["float16"]


def halves_by_numpy(values):
    """The block as NumPy finds it, by way of float64, which holds every product exactly."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        largest = np.abs(values).max(initial=0)
        finite = bool(np.isfinite(largest))
        exponent = int(np.frexp(largest)[1]) - 15 if finite and largest else 113 * (not finite)
        scaled = np.ldexp(values.astype(np.float64), -exponent)
        if finite and exponent == 113:
            scaled = np.clip(scaled, -32752, 32752)
        block = np.zeros(HALVES.max_bytes(values.size, 0), np.uint8)
        block[:4].view(np.int32)[0] = exponent
        # Products below float32's range are rounded to float32 first.
        block[8 : 8 + 2 * values.size] = scaled.astype(np.float32).astype(np.float16).view(np.uint8)
    return block


def assert_halves(values):
    out = np.full(HALVES.max_bytes(values.size, 0) + 8, 7, np.uint8)
    assert HALVES.encode(values, np.array([0]), out) == out.size - 8
    assert (out[-8:] == 7).all()
    np.testing.assert_array_equal(out[:-8], halves_by_numpy(values))


@settings(max_examples=300, deadline=None)
@given(arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_halves_are_those_that_numpy_finds(values):
    values[np.isnan(values)] = np.nan  # which NaN it is does not matter
    assert_halves(values)


@pytest.mark.parametrize("scale", [2.0**e for e in (-149, -140, -126, -112, -98, -30, 0, 30, 98, 99, 111, 112)])
def test_every_half_its_ties_and_its_neighbours(scale):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([halves, ties, *around]) / np.float32(65536) * np.float32(scale)
    assert_halves(np.concatenate([values, -values]))


def test_every_half_is_read_infinities_and_nans_too():
    data = np.zeros(8 + 2 * 65536, np.uint8)
    data[8:] = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for exponent in (-163, -127, -126, -20, 0, 113):
        data[:4].view(np.int32)[0] = exponent
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            wanted = np.ldexp(data[8:].view(np.float16).astype(np.float64), exponent).astype(np.float32)
        got, _ = HALVES.decode(data, 65536, np.array([0]))
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


@pytest.mark.parametrize("exponent", [-164, 114, 2**31 - 1, -(2**31)])
def test_an_impossible_scale_is_refused(exponent):
    block = np.zeros(16, np.uint8)
    block[:4].view("<i4")[0] = exponent
    with pytest.raises(WireError, match=f"exponent is {exponent}, it must be in -163..113"):
        HALVES.decode(block, 2, np.array([0, 2]))


# -- groups with scales of their own ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "codes", "lowest"), [("int8", (3, 128), -128), ("int3", (0b100011, 0), -4)])
def test_the_code_that_is_never_written_is_refused(name, codes, lowest):
    block = np.zeros(16, np.uint8)
    block[:4].view("<f4")[0] = 1.0
    block[8:10] = codes
    with pytest.raises(WireError, match=f"{name}: an entry is {lowest},"):
        VALUE_CODECS[name].decode(block, 2, np.array([0, 2]))


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        ([1.0, -3.0, 2.0, 10.0, -14.0], [2.0, -2.0, 2.0, 12.0, -12.0]),  # the mean magnitude is 6
        ([0.5, -0.5, 0.5], [0.5, -0.5, 0.5]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([3e38, -1e-30, 1e-30], [3e38, -1e-30, 1e-30]),
        ([2.0**-149, 0.0, 0.0, 0.0], [2.0**-149, 0.0, 0.0, 0.0]),
        ([3.4e38, 3.4e38], [3.4e38, 3.4e38]),
        ([-7.0], [-7.0]),
    ],
    ids=["two magnitudes", "all equal", "zeros", "an outlier", "subnormal", "a sum beyond float32", "one"],
)
def test_int2_is_one_of_two_magnitudes(values, decoded):
    got = received(VALUE_CODECS["int2"], np.array(values, np.float32), np.array([0, len(values)]))
    np.testing.assert_array_equal(got, np.array(decoded, np.float32))


def test_int4_splits_the_magnitudes_three_times():
    values = np.array([1, -2, 3, -4, 5, -6, 7, -8, 20, 30, -40, 1000], np.float32)
    # The mean is 93.8. The parts below it are split at 11.5, then at 4.5 and at 30.
    decoded = [2.5, -2.5, 2.5, -2.5, 6.5, -6.5, 6.5, -6.5, 25, 25, -40, 1000]
    got = received(VALUE_CODECS["int4"], values, np.array([0, values.size]))
    np.testing.assert_array_equal(got, np.array(decoded, np.float32))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "large"), [("int8", 384 / 127), ("int3", 12 / 3)])
def test_a_group_of_integers_that_is_not_finite_reads_as_nan(name, large, broken):
    values = np.array([broken, large, 1.0, 2.0], np.float32)  # 384 is -128 where 8 bits are left of it, 12 is -4 of 3
    decoded = received(VALUE_CODECS[name], values, np.array([0, 2, 4]))
    assert np.isnan(decoded[:2]).all()
    assert decoded[3] == 2.0


# -- by name -------------------------------------------------------------------------------------------------------


def test_numbers_are_fixed():
    # Part of the format: a change here breaks hosts that run another release.
    assert {m.name: int(m) for m in IndexCodecId} == {"NONE": 0, "UINT16": 2, "ELIAS_FANO": 3}
    numbers = {"NONE": 0, "FLOAT32": 1, "FLOAT16": 2, "INT8": 4, "INT2": 7, "INT3": 8, "INT4": 9}
    assert {m.name: int(m) for m in ValueCodecId} == numbers


def test_every_number_has_its_codec():
    kinds = ((IndexCodecId, INDEX_CODECS, IndexCodec), (ValueCodecId, VALUE_CODECS, ValueCodec))
    for ids, codecs, protocol in kinds:
        for member in ids:
            if member:
                codec = codecs[member.name.lower()]
                assert (codec.id, codec.name) == (member, member.name.lower())
                assert isinstance(codec, protocol)


class Own(type(INDEX_CODECS["uint16"])):
    """An index codec of a user's own."""

    id, name = 128, "own"


OWN = Own()
register_codec("indices", OWN)


@pytest.mark.parametrize(
    ("option", "changes", "said"),
    [
        ("codec", {}, "option 'codec'; choose one of indices, values"),
        ("indices", {"name": "own"}, "number 129 collides with 'own', which has number 128"),
        ("indices", {"name": "uint16"}, "'uint16' with number 129 collides with 'uint16', which has number 2; names"),
        ("indices", {"id": 128}, "'other' with number 128 collides with 'own'"),
        ("indices", {"id": 7}, "number 7; allowed: 128 to 255"),
        ("indices", {"id": 256}, "number 256; allowed: 128 to 255"),
        ("indices", {"name": "two bytes"}, "cannot be named 'two bytes'"),
        ("indices", {"name": 5}, "cannot be named 5"),
    ],
)
def test_a_codec_that_does_not_fit_is_refused(option, changes, said):
    other = Own()
    other.id, other.name = 129, "other"
    vars(other).update(changes)
    with pytest.raises(ConfigError, match=re.escape(said)):
        register_codec(option, other)
    assert "other" not in INDEX_CODECS


def test_what_a_codec_lacks_is_said():
    class Half:
        id, name, max_bytes = 200, "half", None

    with pytest.raises(ConfigError, match="no ValueCodec: it lacks encode, decode"):
        register_codec("values", Half())


# -- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["float16", "float32", "int8", "int4", "int2"])
@pytest.mark.parametrize("indices", ["uint16", "elias_fano"])
def test_a_sender_knows_what_receivers_read_and_no_old_byte_stays(indices, values):
    n, rng = 200_000, np.random.default_rng(0)
    bucket = Bucket(0, "float32", (Segment(0, 0, n // 2), Segment(1, n // 2, n // 2)), (), n, n)
    positions = np.flatnonzero(rng.random(n) < 0.01)
    given = rng.standard_normal(positions.size).astype(np.float32)
    codec = SparseCodec(bucket, positions.size + 50, indices, values)
    payload = np.full(codec.max_bytes, 7, np.uint8)
    sent = codec.encode(positions, given, payload)
    again = np.zeros(codec.max_bytes, np.uint8)
    codec.encode(positions, given, again)
    np.testing.assert_array_equal(payload, again)
    found = codec.decode(payload, positions.size)
    np.testing.assert_array_equal(found[0], positions)
    np.testing.assert_array_equal(found[1], sent)
    if values not in ("int2", "int4"):
        np.testing.assert_allclose(sent, given, atol=0.02)
