"""Codes and numbers at the edge of what messages may hold, of several compressors."""

import numpy as np
import pytest
from contract_tools import Alone, Case

from dgc.errors import WireError


@pytest.mark.parametrize(
    ("case", "at", "byte"),
    [
        (Case("terngrad"), 4, 243),  # more than five ternary numbers can be
        (Case("terngrad"), 3, 0xFF),  # the scale becomes negative or no number
        (Case("qsgd"), 16, 0xFF),  # level 15 of 0 to 14
        (Case("qsgd", {"bits": 8}), 16, 0xFF),
        (Case("adacomp", {"fc_bin": 50}), 8, 0x3E),  # index 62 in a bin of 50
        (Case("adacomp", {"fc_bin": 50}), 8, 0x3F),  # the mark of an empty bin that is not its last unit
        (Case("dryden"), 3, 0x7F),  # a mean that is no number
        (Case("onebit"), 2, 0xFF),
        (Case("dorefa"), 3, 0xFF),
    ],
    ids=str,
)
def test_codes_that_no_sender_writes_are_refused(case, at, byte):
    alone = Alone(case, {"w": (40, 40)})
    message, count, _ = alone.encode(alone.random())
    alone.decode(message, count)
    message[at] = byte
    if at == 3 and byte == 0x7F:
        message[2] = 0xFF
    if case.name == "onebit":
        message[3] = 0x7F
    with pytest.raises(WireError):
        alone.algorithm.decode(message, count, alone.spec)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "dorefa", "onebit", "dryden", "adacomp"])
def test_numbers_beyond_float32_arrive_as_its_largest(name):
    alone = Alone(Case(name), {"w": (40, 40)}, dtype="float64")
    x = alone.flat({"w": 1e300 * np.where(np.arange(1600) % 2, 1, -1)})
    with np.errstate(over="ignore"):
        message, count, _ = alone.encode(x)
    decoded = alone.decode(message, count)
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(x) >= 0).all()
