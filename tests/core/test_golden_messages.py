"""The bytes of version 1 never change: files hold them, and the document shows one of them."""

import re
from pathlib import Path

import numpy as np
import pytest
from codec_tools import read_back
from golden import regenerate_wire

from dgc.core import codecs
from dgc.core.message import HEADER_BYTES, Flags, unpack_header

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"

CASES = regenerate_wire.cases()
INDEX_CODECS = [codecs.INDEX_CODECS[member.name.lower()] for member in codecs.IndexCodecId if member]
VALUE_CODECS = [codecs.VALUE_CODECS[member.name.lower()] for member in codecs.ValueCodecId if member]


def stored(name):
    text = (GOLDEN / "wire" / f"{name}.hex").read_text()
    return np.frombuffer(bytes.fromhex("".join(line[6:] for line in text.splitlines())), np.uint8)


def test_every_file_has_a_case():
    assert {path.stem for path in (GOLDEN / "wire").glob("*.hex")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bytes_have_not_changed(name):
    assert regenerate_wire.to_text(CASES[name]) == (GOLDEN / "wire" / f"{name}.hex").read_text()


@pytest.mark.parametrize("codec", INDEX_CODECS, ids=lambda codec: codec.name)
def test_stored_positions_can_be_read(codec):
    for case, (n, expected) in regenerate_wire.INDEX_CASES.items():
        name = f"index_{codec.name}_{case}"
        if name in CASES:
            positions, consumed = codec.decode(stored(name), n, len(expected))
            assert positions.tolist() == expected
            assert consumed == stored(name).size


@pytest.mark.parametrize("codec", VALUE_CODECS, ids=lambda codec: codec.name)
def test_stored_values_can_be_read(codec):
    for case, (original, bounds) in regenerate_wire.VALUE_CASES.items():
        name = f"value_{codec.name}_{case}"
        if name in CASES:
            values, consumed = codec.decode(stored(name), len(original), np.array(bounds))
            expected = read_back(codec, np.array(original, np.float32), np.array(bounds))
            assert values.tobytes() == expected.tobytes()
            assert consumed == stored(name).size


def test_stored_message_can_be_read_from_its_header_alone():
    message = stored("message_uint16_float16")
    head = unpack_header(message, "rank 0")
    payload = message[HEADER_BYTES:][: head.payload_bytes]
    n, segments = regenerate_wire.MESSAGE_SEGMENTS[-1], regenerate_wire.MESSAGE_SEGMENTS
    index_codec = codecs.INDEX_CODECS[codecs.IndexCodecId(head.index_codec).name.lower()]
    value_codec = codecs.VALUE_CODECS[codecs.ValueCodecId(head.value_codec).name.lower()]
    positions, used = index_codec.decode(payload, n, head.count)
    bounds = np.searchsorted(positions, segments)
    values, used_too = value_codec.decode(payload[used:], head.count, bounds)
    assert positions.tolist() == regenerate_wire.MESSAGE_POSITIONS
    assert values.tolist() == regenerate_wire.MESSAGE_VALUES
    assert used + used_too == head.payload_bytes
    assert (head.step, head.bucket, head.flags) == (1000, 2, Flags.NONFINITE)
    assert head.fingerprint == 0x0123456789ABCDEF


def test_document_shows_the_golden_message():
    document = (ROOT / "docs" / "wire-format.md").read_text()
    shown = re.findall(r"^[0-9a-f]{4}  (?:[0-9a-f]{2} ?)+", document, flags=re.MULTILINE)
    expected = (GOLDEN / "wire" / "message_uint16_float16.hex").read_text().splitlines()
    assert [line.strip() for line in shown] == expected
