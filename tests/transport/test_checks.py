"""What all transports demand of their arrays."""

import numpy as np
import pytest

from dgc.core.collectives import BYTE_LIMIT, check_allgather, check_allreduce, check_alltoall, reduce_in_rank_order
from dgc.errors import TransportError


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("message", "out", "text"),
    [
        (np.zeros(4, np.int8), None, "contiguous 1-D uint8 message, got int8 of shape"),
        (np.zeros((1, 4), np.uint8), None, r"message, got uint8 of shape \(1, 4\)"),
        (np.zeros(8, np.uint8)[::2], None, "uint8 of shape .4,., not contiguous"),
        (None, np.zeros((3, 4), np.uint8), r"of 4 bytes over 2 ranks writes a .* shape \(2, 4\), got .* \(3, 4\)"),
        (None, np.zeros(8, np.uint8), r"got uint8 of shape \(8,\)"),
        (None, np.zeros((2, 4), np.int8), "got int8"),
        (None, np.zeros((4, 2), np.uint8).T, "not contiguous"),
        (None, read_only(np.zeros((2, 4), np.uint8)), "read-only"),
    ],
)
def test_an_allgather_that_does_not_fit_says_what_it_takes(message, out, text):
    message = np.zeros(4, np.uint8) if message is None else message
    with pytest.raises(TransportError, match=text):
        check_allgather(message, np.zeros((2, 4), np.uint8) if out is None else out, 2)


@pytest.mark.parametrize(
    ("message", "out"),
    [
        (np.zeros((2, 4), np.int8), np.zeros((2, 4), np.uint8)),
        (np.zeros(8, np.uint8), np.zeros(8, np.uint8)),
        (np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8)),
        (np.zeros((2, 4), np.uint8), np.zeros((2, 5), np.uint8)),
        (np.zeros((4, 2), np.uint8).T, np.zeros((2, 4), np.uint8)),
        (np.zeros((2, 4), np.uint8), read_only(np.zeros((2, 4), np.uint8))),
    ],
)
def test_an_alltoall_that_does_not_fit_says_what_it_takes(message, out):
    with pytest.raises(TransportError, match=r"two contiguous uint8 arrays of shape \(2, c\)"):
        check_alltoall(message, out, 2)


@pytest.mark.parametrize(
    ("array", "op", "text"),
    [
        (np.zeros(2), "min", "allreduce knows .'max', 'sum'., got op='min'"),
        (np.zeros(2, np.float16), "sum", "1-D float32 or float64 array, got float16"),
        (np.zeros((1, 2)), "sum", r"shape \(1, 2\)"),
        (np.zeros(4)[::2], "sum", "in place on a contiguous, writeable array, got .* not contiguous"),
        (read_only(np.zeros(2)), "max", "read-only"),
    ],
)
def test_an_allreduce_that_does_not_fit_says_what_it_takes(array, op, text):
    with pytest.raises(TransportError, match=text):
        check_allreduce(array, op)


def test_the_last_size_below_the_limit():
    """Memory that nobody touches costs nothing."""
    array = np.empty(BYTE_LIMIT + 1, np.uint8)
    with pytest.raises(TransportError, match="below 2 GiB, got 2147483648 bytes: use smaller buckets"):
        check_allgather(array, np.empty((1, 0), np.uint8), 1)
    check_allgather(array[:-1], array[None, :-1], 1)
    with pytest.raises(TransportError, match="below 2 GiB, got 2147483648 bytes: use smaller buckets"):
        check_alltoall(array[None], array[None], 1)
    with pytest.raises(TransportError, match="below 2 GiB, got 2147483648 bytes: use smaller buckets"):
        check_allreduce(array.view(np.float32), "sum")
    check_allreduce(array.view(np.float32)[:-1], "sum")


def test_an_overflow_warns_nobody(recwarn):
    parts, out = np.full((2, 1), 3e38, np.float32), np.empty(1, np.float32)
    reduce_in_rank_order(parts, "sum", out)
    assert np.isinf(out)
    assert not recwarn.list
