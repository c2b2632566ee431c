"""Horovod's thread lets go of tensors at a shutdown while another one hands over more: on ranks, of which one ends."""

import pytest
import torch
from launch_tools import run_mpi

from dgc.torch.engine.horovod.held import Placeholders, hold

HANDING_OVER = """
import sys, time
import horovod.torch as hvd, torch
hvd.init()
from dgc.torch.engine.horovod.held import Placeholders
from worker_tools import report

placeholders = Placeholders()
hvd.allreduce(torch.ones(1), name="begin")
if hvd.rank() == 1:
    time.sleep(0.3)
    sys.exit(1)
count = 0
try:
    while True:
        hvd.allreduce_async_(placeholders.take(), name=f"number.{count}")
        count += 1
except hvd.mpi_ops.HorovodInternalError:
    report(count)
"""


@pytest.mark.mpi
def test_a_rank_that_hands_over_tensors_while_another_one_ends_is_told_of_it():
    """With ``torch.ones(1)`` in the place of a placeholder the job hangs nearly always."""
    result = run_mpi(2, HANDING_OVER, check=False)
    assert not result.timed_out, result.explain()
    assert result.values[0] is not None, result.explain()


def test_placeholders_are_used_again_and_are_1():
    placeholders = Placeholders()
    first = placeholders.take()
    other = placeholders.take()
    assert first is not other
    for value in (5.0, 1.0):
        first.fill_(value)
        placeholders.give_back(first, value)
        assert placeholders.take() is first
        assert first.item() == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_a_held_tensor_has_one_reference_more(dtype):
    tensor = torch.ones(3, dtype=dtype)
    before = tensor._use_count()
    holder = hold(tensor)
    assert tensor._use_count() == before + 1
    del holder
    assert tensor._use_count() == before
