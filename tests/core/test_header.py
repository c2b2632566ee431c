"""The 64 bytes of a header: written and read back, and every way in which they can be wrong is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.core.message import HEADER_BYTES, Flags, Header, check_header, pack_header, unpack_header
from dgc.errors import WireError

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))

HEADER = Header(
    compressor=1,
    index_codec=2,
    value_codec=2,
    flags=0,
    step=1000,
    bucket=3,
    fingerprint=0xFEEDFACECAFEBEEF,
    count=500,
    payload_bytes=2048,
    dense_bytes=96,
)


def packed(header=HEADER):
    message = np.full(HEADER_BYTES, 0xAA, np.uint8)
    pack_header(header, message)
    return message


@given(
    header=st.builds(
        Header,
        compressor=U8,
        index_codec=U8,
        value_codec=U8,
        flags=st.integers(0, 15),
        step=U64,
        bucket=U32,
        fingerprint=U64,
        count=U32,
        payload_bytes=U32,
        dense_bytes=U32,
        error_code=U16,
        error_parameter=U32,
        dense_codec=U8,
        absent=U64,
    )
)
def test_reads_what_was_written(header):
    message = np.full(100, 0xAA, np.uint8)
    pack_header(header, message)
    assert unpack_header(message, "rank 5") == header
    assert (message[HEADER_BYTES:] == 0xAA).all()


def test_short_buffers_are_refused():
    for length in range(HEADER_BYTES):
        with pytest.raises(WireError, match=f"{length} bytes came"):
            unpack_header(packed()[:length], "rank 5")


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, ord("X"), "b'XGCm'"),
        (3, 0, "no message of this package"),
        (4, 2, "version 2 came, version 1 was expected.*same release"),
        (40, 64, "flags 0x40 came, known bits are 0x3f"),
        (49, 1, "reserved bytes are not 0"),
    ],
)
def test_foreign_bytes_are_refused(offset, value, complaint):
    message = packed()
    message[offset] = value
    with pytest.raises(WireError, match=f"message from rank 5: .*{complaint}"):
        unpack_header(message, "rank 5")


@pytest.mark.parametrize("flags", [Flags.NONFINITE, Flags.ERROR, Flags.NONFINITE | Flags.ERROR])
def test_flags_are_the_callers_business(flags):
    header = HEADER._replace(flags=int(flags), count=0, error_code=4, error_parameter=17)
    check_header(unpack_header(packed(header), "rank 7"), HEADER, "rank 7")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"compressor": 9}, r"compressor 9 came, 1 was expected.*compression="),
        ({"index_codec": 3}, r"index codec 3 \(elias_fano\) came, 2 \(uint16\) was expected.*indices="),
        ({"index_codec": 77}, r"index codec 77 \(unknown\) came"),
        ({"value_codec": 7}, r"value codec 7 \(int2\) came, 2 \(float16\) was expected.*values="),
        ({"bucket": 4}, r"bucket 4 came, 3 was expected.*different orders"),
        ({"step": 999}, r"step 999 came, 1000 was expected.*out of step"),
        ({"count": 501}, r"count 501 came, at most 500 was expected.*sparsity"),
        ({"payload_bytes": 2049}, r"payload bytes 2049 came, at most 2048 was expected"),
        ({"dense_codec": 4}, r"dense codec 4 \(int8\) came, 0 \(none\) was expected.*small="),
        ({"dense_bytes": 95}, r"dense bytes 95 came, 96 was expected.*min_numel"),
    ],
)
def test_difference_names_sender_field_values_and_remedy(change, complaint):
    with pytest.raises(WireError, match=f"^message from rank 7: {complaint}"):
        check_header(HEADER._replace(**change), HEADER, "rank 7")


def test_every_damaged_byte_of_a_field_that_must_equal_is_noticed():
    # Flags, error code, parameter and what is absent mean what they say; count and payload bytes have upper limits; the
    # fingerprint is compared with the message of this rank (test_message.py).
    for offset in [*range(16), *range(24, 28), *range(36, 40), 41, *range(48, 56)]:
        for bit in range(8):
            message = packed()
            message[offset] ^= 1 << bit
            with pytest.raises(WireError):
                check_header(unpack_header(message, "rank 7"), HEADER, "rank 7")
