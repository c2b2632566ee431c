"""Write the golden messages of the wire format: ``python tests/golden/regenerate_wire.py`` in the repository's root.

``tests/core/test_golden_messages.py`` fails when a byte changes. Regenerate only together with a new format version
(see docs/wire-format.md, "Versions"): other hosts may run the old release.
"""

from pathlib import Path

import numpy as np

from dgc.core import codecs
from dgc.core.message import HEADER_BYTES, Flags, Header, pack_header

FOLDER = Path(__file__).parent / "wire"

# Chosen by hand, not drawn: a random generator's stream may change with NumPy.
INDEX_CASES = {
    "empty": (1000, []),
    "one": (1, [0]),
    "tiles": (200_000, [0, 1, 65_535, 65_536, 131_071, 131_072, 199_999]),
    "two_tiles": (131_072, [131_071]),
    "end": (70_000, list(range(69_980, 70_000))),
    "dense": (130, [i for i in range(130) if i % 3]),
    "spread": (50_000, [i * i * 7 + i for i in range(80)]),
}

# Sums are exact in any order, so that means do not depend on how a machine adds.
VALUE_CASES = {
    "empty": ([], [0, 0]),
    "groups": ([1.0, -0.5, 0.25, 3.0, -1.5, 0.0, 2.0**-30, 1024.0, -2048.0], [0, 3, 3, 6, 9]),
    "extremes": ([3.4028234663852886e38, -(2.0**-149), 2.0**-126, -1e30, 1.0, 65_504.0], [0, 2, 6]),
    "thirds": ([i / 3.0 - 5.0 for i in range(33)], [0, 33]),
}
# The means of "extremes" and "thirds" do round, in float64 first; codecs of means are held by cases that do not.
MEANS, MEAN_CASES = ("int2", "int4"), ("empty", "groups")

MESSAGE_POSITIONS = [3, 70, 65_535, 65_536, 99_999]
MESSAGE_VALUES = [1.0, -0.5, 0.25, 3.0, -0.0009765625]
MESSAGE_SEGMENTS = [0, 60_000, 100_000]


# Two small tensors of 3 and 2 elements, and two elements of one that a user wants exact.
SMALL_VALUES, SMALL_BOUNDS, EXACT_VALUES = [127.0, -1.0, 64.0, -254.0, 2.0], [0, 3, 5], [0.1, -7.0]


def whole_message(indices: str, values: str, small: str | None = None) -> np.ndarray:
    """Return a bucket's message as (m,) uint8: five entries of 100 000 elements in two tensors; perhaps small ones."""
    index_codec, value_codec = codecs.INDEX_CODECS[indices], codecs.VALUE_CODECS[values]
    positions = np.array(MESSAGE_POSITIONS, np.int64)
    bounds = np.searchsorted(positions, np.array(MESSAGE_SEGMENTS))
    n, k = MESSAGE_SEGMENTS[-1], len(MESSAGE_POSITIONS)
    reserve = index_codec.max_bytes(n, k) + value_codec.max_bytes(k, bounds.size - 1)
    dense = dense_section(small) if small else np.empty(0, np.uint8)
    message = np.zeros(HEADER_BYTES + reserve + dense.size, np.uint8)
    payload = message[HEADER_BYTES:]
    used = index_codec.encode(positions, n, payload)
    used += value_codec.encode(np.array(MESSAGE_VALUES, np.float32), bounds, payload[used:])
    head = Header(
        compressor=1,
        index_codec=index_codec.id,
        value_codec=value_codec.id,
        flags=Flags.NONFINITE,
        step=1000,
        bucket=2,
        fingerprint=0x0123456789ABCDEF,
        count=k,
        payload_bytes=used,
        dense_bytes=dense.size,
        dense_codec=codecs.VALUE_CODECS[small].id if small else 0,
    )
    message[HEADER_BYTES + used :][: dense.size] = dense
    pack_header(head, message)
    return message


def dense_section(small: str) -> np.ndarray:
    """Return the dense section of small tensors in a value codec and exact ones, (m,) uint8."""
    codec, bounds = codecs.VALUE_CODECS[small], np.array(SMALL_BOUNDS, np.int64)
    block = np.empty(codec.max_bytes(len(SMALL_VALUES), len(SMALL_BOUNDS) - 1), np.uint8)
    codec.encode(np.array(SMALL_VALUES, np.float32), bounds, block)
    return np.concatenate([block, np.array(EXACT_VALUES, "<f4").view(np.uint8)])


def cases() -> dict[str, bytes]:
    """Return every golden message by the name of its file."""
    golden = {}
    for codec in (codecs.INDEX_CODECS[member.name.lower()] for member in codecs.IndexCodecId if member):
        for case, (n, positions) in INDEX_CASES.items():
            out = np.empty(codec.max_bytes(n, len(positions)), np.uint8)
            used = codec.encode(np.array(positions, np.int64), n, out)
            golden[f"index_{codec.name}_{case}"] = out[:used].tobytes()
    for codec in (codecs.VALUE_CODECS[member.name.lower()] for member in codecs.ValueCodecId if member):
        for case, (values, bounds) in VALUE_CASES.items():
            if codec.name in MEANS and case not in MEAN_CASES:
                continue
            out = np.empty(codec.max_bytes(len(values), len(bounds) - 1), np.uint8)
            used = codec.encode(np.array(values, np.float32), np.array(bounds, np.int64), out)
            golden[f"value_{codec.name}_{case}"] = out[:used].tobytes()
    golden["message_uint16_float16"] = whole_message("uint16", "float16").tobytes()
    golden["message_elias_fano_int2"] = whole_message("elias_fano", "int2", "int2").tobytes()
    golden["message_elias_fano_int2_int3"] = whole_message("elias_fano", "int2", "int3").tobytes()
    golden["message_small_int8"] = whole_message("uint16", "float16", "int8").tobytes()
    return golden


def to_text(message: bytes) -> str:
    """Return lines of 16 bytes: offset, then bytes in hexadecimal."""
    rows = (f"{at:04x}  {message[at : at + 16].hex(' ')}\n" for at in range(0, len(message), 16))
    return "".join(rows)


def main() -> None:
    """Replace the files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.hex"):
        old.unlink()
    for name, message in cases().items():
        (FOLDER / f"{name}.hex").write_text(to_text(message))


if __name__ == "__main__":
    main()
