"""``import dgc`` is light: a job that only needs the core pays for no framework."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "tensorflow", "keras", "mpi4py", "horovod", "cupy", "numba")


@pytest.mark.parametrize(
    "module", ["dgc", "dgc.core", "dgc.core.codecs", "dgc.transport", "dgc.core.exchange.exchange"]
)
def test_importing_loads_no_framework(module):
    heavy = HEAVY[:-1] if module == "dgc.core.exchange.exchange" else HEAVY
    source = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
