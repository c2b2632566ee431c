"""Tables of work: addresses and types that a kernel may read, and a refusal of all others."""

import numpy as np
import pytest

from dgc.core.kernels import sweep as table
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.sweep import address_of, element_code, make_table, place_of
from dgc.errors import LayoutError

CODES = {"float32": table.FLOAT32, "float64": table.FLOAT64, "float16": table.FLOAT16, "uint16": table.BFLOAT16}


@pytest.mark.parametrize(("dtype", "code"), CODES.items())
@pytest.mark.parametrize("n", [0, 1, 5])
def test_address_and_code_of_every_type(dtype, code, n):
    array = np.zeros(n, dtype)
    assert place_of(array, n, "gradient") == (array.ctypes.data, code)
    array.flags.writeable = False
    assert place_of(array, n, "gradient") == (array.ctypes.data, code)


def test_an_address_is_that_of_the_first_element_of_a_view():
    array = np.zeros(8, np.float32)
    assert address_of(array[3:]) == array.ctypes.data + 12


def unaligned():
    return np.zeros(17, np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, np.float32), r"the gradient has shape \(3,\); expected \(4,\)"),
        (np.zeros((2, 2), np.float32), r"shape \(2, 2\)"),
        (np.zeros((), np.float32), r"shape \(\)"),
        (np.zeros(8, np.float32)[::2], "strided or unaligned view; pass a contiguous copy"),
        (np.zeros(4, np.float32)[::-1], "strided or unaligned view"),
        (unaligned(), "strided or unaligned view"),
        (np.zeros(4, np.int32), "type int32; allowed: float16, float32, float64, bfloat16"),
        (np.zeros(4, ">f4"), "type >f4; allowed"),
        (np.zeros(4, bool), "type bool; allowed"),
    ],
)
def test_what_a_kernel_cannot_read_is_refused(array, message):
    for check in (element_code, place_of):
        with pytest.raises(LayoutError, match=message):
            check(array, 4, "gradient")


def segment(offset, length, k=1, **options):
    return SegmentWork(np.zeros(max(length, 0), np.float32), None, offset, length, k, **options)


def test_the_tables_of_no_work_are_empty():
    integers, reals = make_table([], 0)
    assert (integers.shape, reals.shape) == ((0, table.INTEGERS), (0, table.REALS))


def test_every_column_holds_what_it_is_called():
    parameter = np.zeros(5, np.float64)
    work = [
        SegmentWork(np.zeros(5, np.float16), parameter, 16, 5, 2, 0.9, True, 0.01, 0.5),
        SegmentWork(np.zeros(3, np.float32), None, 0, 3, 9, 0.9),
        SegmentWork(np.zeros(3, np.float32), np.zeros(3, np.float32), 3, 3, 0, 0.0, True),
    ]
    integers, reals = make_table(work, 32)
    assert integers[:, table.GRADIENT].tolist() == [w.gradient.ctypes.data for w in work]
    assert integers[:, table.GRADIENT_TYPE].tolist() == [table.FLOAT16, table.FLOAT32, table.FLOAT32]
    # Without weight decay nobody reads the parameter.
    assert integers[:, table.PARAMETER].tolist() == [parameter.ctypes.data, 0, 0]
    assert integers[0, table.PARAMETER_TYPE] == table.FLOAT64
    assert integers[:, table.OFFSET].tolist() == [16, 0, 3]
    assert integers[:, table.LENGTH].tolist() == [5, 3, 3]
    # Nobody sends more than there is.
    assert integers[:, table.ENTRIES].tolist() == [2, 3, 0]
    assert integers[:, table.FORM].tolist() == [table.NESTEROV, table.HEAVY_BALL, table.NO_MOMENTUM]
    assert not integers[:, table.KEY :].any()
    assert reals.tolist() == [[0.9, 0.01, 0.5, 0.0], [0.9, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 8), (8, 0), (7, 1)])
def test_a_segment_may_reach_the_end(offset, length):
    make_table([segment(offset, length)], 8)


@pytest.mark.parametrize(("offset", "length"), [(0, 9), (8, 1), (9, 0), (-1, 1), (0, -1)])
def test_a_segment_outside_is_refused(offset, length):
    with pytest.raises(LayoutError, match=f"a segment at {offset} of {length} elements does not fit into 8"):
        make_table([segment(offset, length)], 8)


def test_a_parameter_that_cannot_be_read_is_named():
    work = SegmentWork(np.zeros(4, np.float32), np.zeros(5, np.float32), 0, 4, 1, weight_decay=0.1)
    with pytest.raises(LayoutError, match="the parameter has shape"):
        make_table([work], 4)
