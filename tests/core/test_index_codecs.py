"""Index codecs: what is written comes back, within the reserve; what is damaged is refused, never misread."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.codecs import INDEX_CODECS, IndexCodecId, SparseCodec, elias_fano_shape
from dgc.core.config import DGCConfig
from dgc.core.layout import Parameter, make_layout
from dgc.errors import WireError

CODECS = [INDEX_CODECS[member.name.lower()] for member in IndexCodecId if member]
TILE = 65_536

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@st.composite
def buckets(draw, largest=4 * TILE):
    """n and sorted unique positions below n: sparse, full, empty, clustered, on tile edges."""
    n = draw(
        st.one_of(
            st.sampled_from([0, 1, 2, 63, 64, 65, TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE - 1]),
            st.integers(0, largest),
        )
    )
    kind = draw(st.sampled_from(["random", "start", "end", "one tile", "edges", "full", "even"]))
    k = draw(st.integers(0, min(n, 300)))
    if kind == "start":
        chosen = np.arange(k)
    elif kind == "end":
        chosen = np.arange(n - k, n)
    elif kind == "full":
        chosen = np.arange(n)
    elif kind == "even":
        chosen = np.linspace(0, max(n - 1, 0), k)
    elif kind == "edges":
        edges = np.arange(0, n + 1, TILE)
        chosen = np.concatenate([edges - 1, edges, edges + 1, [0, n - 1]])
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        low = rng.integers(n + 1) // TILE * TILE if kind == "one tile" else 0
        high = min(low + TILE, n) if kind == "one tile" else n
        chosen = rng.integers(low, max(high, low + 1), k)
    positions = np.unique(chosen.astype(np.int64))
    return n, positions[(positions >= 0) & (positions < n)]


def encoded(codec, positions, n):
    out = np.full(codec.max_bytes(n, positions.size), 0xAA, np.uint8)
    return out[: codec.encode(positions, n, out)]


@codecs
@settings(deadline=None)
@given(bucket=buckets(), shift=st.integers(0, 7))
def test_positions_come_back(codec, bucket, shift):
    n, positions = bucket
    reserve = codec.max_bytes(n, positions.size)
    # In the middle of other bytes, at any alignment, beside canaries.
    buffer = np.full(shift + reserve + 40, 0xAA, np.uint8)
    used = codec.encode(positions, n, buffer[shift : shift + reserve])
    assert used <= reserve
    assert used % 8 == 0
    assert (buffer[:shift] == 0xAA).all()
    assert (buffer[shift + used :] == 0xAA).all()
    buffer.flags.writeable = False
    decoded, consumed = codec.decode(buffer[shift:], n, positions.size)
    assert consumed == used
    assert decoded.dtype == np.int64
    np.testing.assert_array_equal(decoded, positions)


def bits(rows, words):
    """(w,) uint64 of these bits, the lowest first."""
    packed = np.packbits(rows.astype(np.uint8).reshape(-1), bitorder="little")
    return np.pad(packed, (0, 8 * words - packed.size)).view(np.uint64)


@settings(deadline=None)
@given(bucket=buckets())
def test_elias_fano_writes_the_bits_that_numpy_finds(bucket):
    n, positions = bucket
    width, low_words, high_words = elias_fano_shape(n, positions.size)
    high = np.zeros(64 * high_words)
    high[(positions >> width) + np.arange(positions.size)] = 1
    low = positions[:, None] >> np.arange(width) & 1
    wanted = np.concatenate([bits(low, low_words), bits(high, high_words)])
    np.testing.assert_array_equal(encoded(INDEX_CODECS["elias_fano"], positions, n).view(np.uint64), wanted)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 2**32), st.floats(0, 0.3))
def test_uint16_writes_the_tiles_that_numpy_finds(n, seed, density):
    positions = np.flatnonzero(np.random.default_rng(seed).random(n) < density)
    tiles = -(-n // TILE)
    edges = np.searchsorted(positions, np.arange(tiles + 1) * TILE)
    table = np.pad(np.diff(edges).astype(np.uint32), (0, tiles % 2)).view(np.uint8)
    offsets = np.pad((positions & 0xFFFF).astype(np.uint16), (0, -positions.size % 4)).view(np.uint8)
    block = encoded(INDEX_CODECS["uint16"], positions, n)
    np.testing.assert_array_equal(block, np.concatenate([table, offsets]))


@pytest.mark.parametrize(
    ("name", "density", "most"),
    [("elias_fano", 0.001, 12.0), ("elias_fano", 0.01, 8.6), ("uint16", 0.001, 16.55), ("uint16", 0.01, 16.1)],
)
def test_bits_per_entry(name, density, most):
    n = 6_500_000
    positions = np.flatnonzero(np.random.default_rng(1).random(n) < density)
    assert 8 * encoded(INDEX_CODECS[name], positions, n).size / positions.size <= most


@codecs
@pytest.mark.parametrize(
    ("n", "positions"),
    [(1, [0]), (700, [3, 5, 699]), (3 * TILE, [0, TILE - 1, TILE, 3 * TILE - 1]), (64, list(range(64)))],
)
def test_truncation_at_every_length_is_an_error(codec, n, positions):
    block = encoded(codec, np.array(positions, np.int64), n)
    for length in range(block.size):
        with pytest.raises(WireError, match=f"{codec.name}: the block takes {block.size} bytes.*only {length} left"):
            codec.decode(block[:length], n, len(positions))


@codecs
def test_short_output_is_an_error_and_untouched(codec):
    positions = np.array([1, 5, 900], np.int64)
    for short in range(codec.max_bytes(1000, 3)):
        out = np.full(short, 0xAA, np.uint8)
        with pytest.raises(WireError, match="Size the message with max_bytes"):
            codec.encode(positions, 1000, out)
        assert (out == 0xAA).all()


@codecs
def test_only_flat_contiguous_bytes_are_accepted(codec):
    for data in (np.zeros(4000, np.int8), np.zeros((2, 4000), np.uint8), np.zeros(8000, np.uint8)[::2]):
        with pytest.raises(WireError, match="contiguous one-dimensional uint8"):
            codec.decode(data, 1000, 3)
        with pytest.raises(WireError, match="contiguous one-dimensional uint8"):
            codec.encode(np.array([1, 2]), 1000, data)


@codecs
@pytest.mark.parametrize("claimed", [2, 4])
def test_count_of_another_message_is_an_error(codec, claimed):
    block = encoded(codec, np.array([10, 400, 999], np.int64), 1000)
    with pytest.raises(WireError):
        codec.decode(np.concatenate([block, np.zeros(64, np.uint8)]), 1000, claimed)


@pytest.mark.parametrize("positions", [[5, 4], [5, 5], [-1, 5], [5, 1000], [2**40], [-(2**40)], [0, 1, 2, 1]])
def test_bit_vectors_refuse_to_write_outside_their_block(positions):
    codec = INDEX_CODECS["elias_fano"]
    buffer = np.full(codec.max_bytes(1000, len(positions)) + 64, 0xAA, np.uint8)
    with pytest.raises(WireError, match=r"must be strictly ascending in 0\.\.999"):
        codec.encode(np.array(positions, np.int64), 1000, buffer[32:-32])
    assert (buffer[:32] == 0xAA).all()
    assert (buffer[-32:] == 0xAA).all()


@pytest.mark.parametrize("positions", [[5, 4], [5, 5], [0, 1, 2, 1], [900, 1000, 901]])
def test_unsorted_positions_are_refused_by_the_receiver(positions):
    block = encoded(INDEX_CODECS["uint16"], np.array(positions, np.int64), 1000)
    with pytest.raises(WireError):
        INDEX_CODECS["uint16"].decode(block, 1000, len(positions))


def sparse_codec():
    """Of a bucket in which tensors take the places 0..9 and 16..36 of 48."""
    config = DGCConfig(min_numel=1)
    (bucket,) = make_layout([Parameter("a", (3, 7), "float32"), Parameter("b", (2, 5), "float32")], config).buckets
    return SparseCodec(bucket, 6, "elias_fano", "float32")


@pytest.mark.parametrize("count", [-1, 49, 2**32 - 1])
def test_impossible_counts_are_refused(count):
    with pytest.raises(WireError, match=f"claims {count} entries in a bucket of 48"):
        sparse_codec().decode(np.zeros(100_000, np.uint8), count)


@pytest.mark.parametrize("place", [0, 9, 10, 15, 16, 36, 37, 47])
def test_positions_in_the_padding_between_tensors_are_refused(place):
    codec = sparse_codec()
    out = np.zeros(codec.max_bytes, np.uint8)
    codec.indices.encode(np.array([place], np.int64), 48, out)
    if place < 10 or 16 <= place < 37:
        assert codec.decode(out, 1)[0].tolist() == [place]
        return
    with pytest.raises(WireError, match="padding between tensors"):
        codec.decode(out, 1)


FUZZ_BUCKETS = [
    (50, [0, 7, 8, 31, 49]),
    (1000, list(range(0, 1000, 37))),
    (TILE + 1, [0, TILE - 1, TILE]),
    (150_000, [5, 6, 7, TILE, TILE + 1, 140_000, 149_999]),
    (64, list(range(64))),
    (300, []),
]


def outcome(codec, data, n, count):
    """Positions and length, or None for a WireError; any other exception is a failure."""
    try:
        positions, consumed = codec.decode(data, n, count)
    except WireError:
        return None
    assert positions.size == count
    assert consumed <= data.size
    assert count == 0 or (positions[0] >= 0 and positions[-1] < n)
    assert (np.diff(positions) > 0).all()
    return positions.tobytes(), consumed


def mutated(rng, block, before=16):
    """A damaged copy between two different fills, so that a read outside the block shows as a difference."""
    damaged = block.copy()
    kind = rng.integers(4)
    if damaged.size:
        where = rng.integers(damaged.size, size=rng.integers(1, 5))
        damaged[where] = rng.integers(256, size=where.size) if kind else damaged[where] ^ (1 << rng.integers(8))
        if kind == 3:
            damaged = damaged[: rng.integers(damaged.size + 1)]
    twins = []
    for fill in (0x00, 0xFF):
        buffer = np.full(damaged.size + 2 * before, fill, np.uint8)
        buffer[before : before + damaged.size] = damaged
        twins.append(buffer[before : before + damaged.size])
    return twins


@codecs
def test_damaged_blocks_are_refused_or_still_valid(codec):
    rounds, refused = 1500, 0
    rng = np.random.default_rng(11)
    for n, positions in FUZZ_BUCKETS:
        block = encoded(codec, np.array(positions, np.int64), n)
        for _ in range(rounds):
            claimed = len(positions) if rng.integers(4) else int(rng.integers(n + 1))
            one, other = (outcome(codec, twin, n, claimed) for twin in mutated(rng, block))
            assert one == other
            refused += one is None
    assert 0.2 * rounds * len(FUZZ_BUCKETS) < refused < rounds * len(FUZZ_BUCKETS)


def test_compiled_loops_stay_inside_their_arrays(tmp_path):
    """The same damage with Numba's bounds checks on, which have to be compiled in from the start."""
    code = """
import numpy as np
import test_index_codecs as tests
for codec in tests.CODECS:
    rng = np.random.default_rng(13)
    for n, positions in tests.FUZZ_BUCKETS:
        block = tests.encoded(codec, np.array(positions, np.int64), n)
        for _ in range(500):
            tests.outcome(codec, tests.mutated(rng, block)[0], n, len(positions))
print("inside")
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.stdout.strip() == "inside", done.stderr
