"""The bytes of version 1 never change: files hold them, and the document shows one of them."""

import re
from pathlib import Path

import numpy as np
import pytest
from golden import regenerate_wire

from dgc.core import codecs
from dgc.core.message import HEADER_BYTES, Flags, unpack_header

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "wire"

CASES = regenerate_wire.cases()


@pytest.mark.parametrize("name", CASES)
def test_bytes_have_not_changed(name):
    assert regenerate_wire.to_text(CASES[name]) == (GOLDEN / f"{name}.hex").read_text()


def test_stored_message_can_be_read_from_its_header_alone():
    text = (GOLDEN / "message_uint16_float16.hex").read_text()
    message = np.frombuffer(bytes.fromhex("".join(line[6:] for line in text.splitlines())), np.uint8)
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
    expected = (GOLDEN / "message_uint16_float16.hex").read_text().splitlines()
    assert [line.strip() for line in shown] == expected
