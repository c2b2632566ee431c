"""The lab of hosts on one machine (benchmarks/network), which measures and breaks what crosses a network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks" / "network" / "run.py"
sys.path.append(str(ROOT / "benchmarks"))  # last: names there may be those of tests

from network import requirements  # noqa: E402
from network.lab import Lab, LabError  # noqa: E402
from network.processes import of_lab  # noqa: E402

LACKING = requirements.missing()
needs_lab = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

SUM = """
import sys
import numpy as np
from mpi4py import MPI
array = np.ones(500_000)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
# In one piece: ranks share the output, and print() writes several where it is not buffered.
sys.stdout.write(f"{MPI.Get_processor_name()} of {MPI.COMM_WORLD.size} got {set(array.tolist())}\\n")
"""


def run(*arguments: str, temporary: Path, **options) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, str(RUN), *arguments], env=environment, **pipes, **options)


@needs_lab
@pytest.mark.mpi
def test_an_allreduce_crosses_the_links(tmp_path):
    job = run("--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-c", SUM, temporary=tmp_path)
    out, error = job.communicate(timeout=600)
    assert job.returncode == 0, error
    assert sorted(out.splitlines()) == ["host1 of 2 got {2.0}", "host2 of 2 got {2.0}"]
    counted = re.findall(r"(host\d) sent ([\d,]+) bytes and received ([\d,]+)", error)
    assert [name for name, *_ in counted] == ["host1", "host2"]
    for _, *numbers in counted:
        for number in numbers:  # an array of 4 MB; two ranks send and receive each of it once
            assert 4_000_000 <= int(number.replace(",", "")) < 5_000_000
    assert not list(tmp_path.glob("dgc-lab-*"))


@needs_lab
@pytest.mark.mpi
def test_a_killed_lab_leaves_nothing_that_runs_and_cleanup_removes_its_folder(tmp_path):
    started = tmp_path / "started"
    sleeper = f"touch {started}-$OMPI_COMM_WORLD_RANK; exec sleep 3600"
    job = run("--no-measure", "--", "sh", "-c", sleeper, temporary=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2, job)
    (folder,) = tmp_path.glob("dgc-lab-*")
    in_use = run("--cleanup", temporary=tmp_path).communicate(timeout=600)[0]
    assert f"in use by process {job.pid}" in in_use
    assert len(of_lab(str(folder))) >= 5  # the head, two hosts, two sleepers

    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not of_lab(str(folder)))
    job.communicate()
    assert folder.exists()
    assert "removed" in run("--cleanup", temporary=tmp_path).communicate(timeout=600)[0]
    assert not folder.exists()


@needs_lab
def test_links_go_down_slow_down_and_hosts_die(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Lab(2, "1gbit") as lab:

        def state() -> str:
            return json.loads(lab.run("host2", ["ip", "-json", "link", "show", "eth0"]))[0]["operstate"]

        assert state() == "UP"
        lab.link_down("host2", 0.3)
        wait_until(lambda: state() == "UP")

        lab.rate("host1", "10mbit")
        shaped = lab.run("host1", ["tc", "qdisc", "show", "dev", "eth0"])
        assert "tbf" in shaped
        assert "rate 10Mbit" in shaped

        lab.link_down("host2")
        assert state() != "UP"
        sleeper = lab.start("host2", ["sleep", "3600"])
        lab.kill_host("host2")
        assert sleeper.wait(timeout=300) != 0
        assert not lab.hosts["host2"].alive
        with pytest.raises(LabError, match="there are head, host1, host2"):
            lab.run("host3", ["true"])
        folder = str(lab.folder)
    assert not of_lab(folder)
    assert not Path(folder).exists()


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert requirements.missing() == (
        "the lab needs root, to make network namespaces: run the same command as root (sudo)"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    assert "apt install iproute2" in requirements.missing()
    with pytest.raises(LabError, match="2 to 16 hosts"):
        Lab(17)


def wait_until(condition, job=None, seconds=600.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if job is not None and job.poll() is not None:
            pytest.fail(job.communicate()[1])
        if time.monotonic() > deadline:
            pytest.fail("waited in vain")
        time.sleep(0.05)
