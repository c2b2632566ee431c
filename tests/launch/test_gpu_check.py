"""The scripts for a machine with a GPU, on one where nobody sees any: they say so, and nothing passes by skipping."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def run(command, **environment):
    return subprocess.run(
        command, cwd=REPOSITORY, env={**HIDDEN, **environment}, capture_output=True, text=True, timeout=500
    )


def test_no_device_is_said_at_once(tmp_path):
    done = run(["bash", "benchmarks/gpu_check.sh"], OUT=str(tmp_path))
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_skips_itself_has_failed_where_a_gpu_is_required():
    file = "tests/core/kernels/test_gpu.py::test_views_of_foreign_memory"
    done = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file], DGC_REQUIRE_GPU="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "and this did not run" in done.stdout
