"""For all tests: no clock and no chance in hypothesis, kernels compiled beforehand, and what must not skip itself."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from rank_jobs import Ranks

REPOSITORY = Path(__file__).resolve().parent

# A busy machine is no failure, and every run tries the same examples, in CI and elsewhere. To search for new ones:
# pytest --hypothesis-profile=default
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fill Numba's cache; after a change to a kernel, compiling would otherwise count against some job's time limit."""
    if not session.items or session.config.option.collectonly or "DGC_KERNELS_COMPILED" in os.environ:
        return
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "dgc", "compile"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=600,
            check=False,
        )


REQUIRES_GPU = os.environ.get("DGC_REQUIRE_GPU") == "1"
"""Whether what cannot run here has failed: for runs of the tests that need a GPU, on a machine that has one."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where a GPU is required, a test that skips itself has failed."""
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """And so has a file that skips itself."""
    return _required((yield))


def _required(report):
    if REQUIRES_GPU and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"DGC_REQUIRE_GPU=1, and this did not run. {reason}"
    return report


@pytest.fixture(scope="session")
def ranks():
    """Real ranks that live as long as the session; see ``rank_jobs``."""
    living = Ranks()
    yield living
    living.close()
