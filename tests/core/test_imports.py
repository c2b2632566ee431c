"""``import dgc`` is light: a job that only needs the core pays for no framework."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "tensorflow", "keras", "mpi4py", "horovod", "cupy")
NUMBA = (*HEAVY, "numba")
MODULES = {
    "dgc, dgc.core, dgc.transport": NUMBA,
    "dgc.core.codecs": NUMBA,
    "dgc.core.exchange.exchange, dgc.adapter.agreement, dgc.transport.local, dgc.transport.mpi": HEAVY,
}


@pytest.mark.parametrize("modules", MODULES)
def test_importing_loads_no_framework_and_starts_no_mpi(modules):
    source = f"import subprocess, sys, {modules}; print([m for m in {MODULES[modules]!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
