"""Blocks of a message: padding, and nothing touched outside of one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.core import codecs as blocks
from dgc.errors import WireError


@given(st.integers(0, 2**40))
def test_padding_adds_less_than_a_word(nbytes):
    assert nbytes <= blocks.padded(nbytes) < nbytes + 8
    assert blocks.padded(nbytes) % 8 == 0


@given(st.integers(0, 2**40))
def test_words_hold_the_bits_and_none_is_empty(bits):
    words = blocks.words_for(bits)
    assert 64 * (words - 1) < bits <= 64 * words or bits == words == 0


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8])
def test_a_block_is_the_beginning_of_the_message_itself(nbytes):
    message = np.zeros(8, np.uint8)
    part = blocks.block_of(message, nbytes, "raw")
    part[...] = 1
    assert message.tolist() == [1] * nbytes + [0] * (8 - nbytes)


@pytest.mark.parametrize(
    ("writes", "advice"),
    [
        (False, "has only 8 left. It was cut short, or its header does not belong to it"),
        (True, r"has 8 left for it. Size the message with max_bytes\(\)"),
    ],
)
def test_one_byte_too_many_is_refused(writes, advice):
    with pytest.raises(WireError, match=f"^raw: the block takes 9 bytes, the message {advice}"):
        blocks.block_of(np.zeros(8, np.uint8), 9, "raw", writes=writes)


@pytest.mark.parametrize("array", [np.zeros(8, np.int8), np.zeros((1, 8), np.uint8), np.zeros(16, np.uint8)[::2]])
def test_only_bytes_in_a_row_are_a_message(array):
    with pytest.raises(WireError, match=r"^raw: a message is a contiguous one-dimensional uint8 array"):
        blocks.block_of(array, 0, "raw")


@pytest.mark.parametrize("at", range(9))
def test_words_are_little_endian_at_every_address(at):
    memory = np.zeros(32, np.uint8)
    block = memory[at : at + 16]
    block[:] = np.arange(16)
    words = blocks.as_words(block)
    assert words.flags.aligned
    assert [int(word) for word in words] == [int.from_bytes(bytes(range(i, i + 8)), "little") for i in (0, 8)]


def test_no_words_of_an_empty_block():
    assert blocks.as_words(np.zeros(0, np.uint8)).size == 0
