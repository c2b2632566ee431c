"""Elastic Horovod: a rank is killed or left out, the others go on without it, and a new one comes."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import BIN, REPOSITORY, environment_for, read_reports, require
from rank_jobs import each_case

WORKERS = Path(__file__).parent / "workers"

test_elastic = each_case(WORKERS / "elastic_cases.py")
test_elastic_lost = each_case(WORKERS / "elastic_lost_cases.py")


@pytest.mark.mpi
def test_the_page_as_it_stands_on_one_machine(tmp_path):
    require("gloo")
    page = (REPOSITORY / "docs" / "pytorch.md").read_text().split("## Elastic jobs")[1].split("\n## ")[0]
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script + "print('trained', state.epoch)\n")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o700)
    result = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment_for({}), capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("trained 2") == 2, result.stdout + result.stderr


@pytest.mark.mpi
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "syncing", "discovery"])
def test_a_rank_is_lost_and_another_one_comes(tmp_path, way):
    require("gloo")
    # Four names of one machine: the host of a rank that died is left alone for some seconds.
    (tmp_path / "hosts").write_text(f"localhost:1\n127.0.0.1:1\n{socket.gethostname()}:1\nLocalHost:1\n")
    discovery = tmp_path / "discovery.sh"
    discovery.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discovery.chmod(0o700)
    command = [BIN / "horovodrun", "--gloo", "-np", "4", "--min-np", "3", "--max-np", "4", "--host-discovery-script"]
    command += [discovery, "--blacklist-cooldown-range", "3", "5"]
    command += [sys.executable, WORKERS / "elastic_job.py", tmp_path, "4", way]
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
    assert {size for size, _ in begun} == {3, 4}, begun
    kept = min(batch for size, batch in begun if size == 3)
    assert {"killed": kept == 10, "syncing": kept == 0, "discovery": kept >= 15}[way], begun
    assert [v for v in found if "identical" in v] == [{"identical": True, "size": 4}] * 4
    if way == "syncing":
        return  # nothing had been committed, and nothing is lost
    lost = [text for v in found for text in v.get("warnings", [])]
    text = rf"1 of 4 ranks left, and with them what they had not sent until step {kept}$"
    assert any(re.match(text, t) for t in lost), lost
