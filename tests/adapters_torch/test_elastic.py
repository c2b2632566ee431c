"""Elastic Horovod: a rank is killed, the others go on without it, and a new one comes."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import BIN, environment_for, read_reports, require

WORKER = Path(__file__).parent / "workers" / "elastic_job.py"


@pytest.mark.mpi
def test_a_rank_is_killed_and_another_one_comes(tmp_path):
    require("gloo")
    discovery = tmp_path / "discovery.sh"
    # Three names of one machine: the host of a rank that died is left alone for some seconds.
    discovery.write_text(f"#!/bin/sh\necho localhost:1; echo 127.0.0.1:1; echo {socket.gethostname()}:1\n")
    discovery.chmod(0o700)
    command = [BIN / "horovodrun", "--gloo", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script"]
    command += [discovery, "--blacklist-cooldown-range", "3", "5", sys.executable, WORKER, tmp_path, "3"]
    result = subprocess.run(
        [*map(str, command)],
        env=environment_for({"DGC_TEST_REPORTS": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = [value for path in tmp_path.glob("rank*.jsonl") for value in read_reports(path)]
    begun = [(v["size"], v["batch"]) for v in found if "batch" in v]
    assert {size for size, _ in begun} == {2, 3}, begun
    assert (2, 10) in begun, begun
    assert [v for v in found if "identical" in v] == [{"identical": True, "size": 3}] * 3
    lost = [text for v in found for text in v.get("warnings", [])]
    assert any(
        re.match(r"1 of 3 ranks left \(ranks 2\), and with them what they had not sent until step 10", t) for t in lost
    )
