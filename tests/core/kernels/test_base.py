"""The host's memory behind the common face, and whose memory a backend works on."""

import numpy as np
import pytest

from dgc.core.kernels.base import HostMemory
from dgc.core.kernels.reference import ReferenceKernels


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_goes_in_comes_out_as_a_copy(n, dtype):
    memory = HostMemory()
    array = memory.zeros(n, dtype)
    assert array.tolist() == [0] * n
    memory.copy_in(array, np.arange(n, dtype=dtype))
    host = memory.to_host(array)
    memory.fill(array, 3)
    assert host.tolist() == list(range(n))
    memory.copy(array, host)
    assert array.tolist() == list(range(n))
    assert memory.sum_of_squares(array) == sum(i * i for i in range(n))
    assert memory.host_array(n, dtype).shape == (n,)


def test_squares_are_summed_in_float64():
    """In float32 the sum would overflow."""
    assert HostMemory().sum_of_squares(np.full(2, 2e19, np.float32)) == pytest.approx(8e38)


def test_another_number_of_values_is_refused():
    with pytest.raises(ValueError, match="broadcast"):
        HostMemory().copy_in(np.zeros(3), np.zeros(2))


def test_a_backend_that_defines_only_operations_works_on_the_hosts_memory():
    kernels = ReferenceKernels()
    assert isinstance(kernels.memory, HostMemory)
    assert not kernels.on_device
    assert not kernels.overlaps
    kernels.adopt_thread()
