"""The processor's stand-in for a device finds what a device would not forgive."""

import subprocess
import sys
from pathlib import Path

import host_runtime
import numpy as np
import pytest
from host_runtime import compiler

from dgc.core.kernels.gpu.cuda.source import source

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def test_the_stand_in_finds_diverging_barriers(tmp_path):
    """The processor's stand-in for a device must not let wrong code pass: it ends the process."""
    line = "    if (segment.source != CANDIDATES) return;\n"
    assert line in source()
    divergent = "    if (threadIdx.x & 1) __syncthreads(); else __ballot_sync(ALL_LANES, 1);\n"
    text = tmp_path / "broken.cu"
    text.write_text(source().replace(line, divergent + line))
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1])\n"
        "from host_runtime import HostRuntime\n"
        "from dgc.core.kernels.base import SegmentWork\n"
        "from dgc.core.kernels.gpu.backend import DeviceKernels\n"
        "u = np.zeros(64, np.float32)\n"
        "work = [SegmentWork(np.ones(64, np.float32), None, 0, 64, 1)]\n"
        "DeviceKernels(HostRuntime(text=open(sys.argv[2]).read())).accumulate(work, u, u.copy())\n"
    )
    tools = str(Path(host_runtime.__file__).parent)
    done = subprocess.run([sys.executable, script, tools, text], capture_output=True, text=True)
    assert done.returncode != 0
    assert "different barriers" in done.stderr
