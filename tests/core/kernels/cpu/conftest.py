"""The CPU kernels with one thread and with two, in either type of the state."""

import pytest

from dgc.core.kernels.cpu import NumbaKernels


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    return NumbaKernels(request.param)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param
