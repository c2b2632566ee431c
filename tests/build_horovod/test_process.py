"""Long commands are shown to be alive, explain their failures and end with the command that started them."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgc.build_horovod import process


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def running(process_id):
    """Whether a process lives; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("cannot write: No space left on device", "TMPDIR"),
        ("x.cc:1:10: fatal error: nope.h: No such file or directory", "nope.h"),
        ("ERROR: Could not find a version that satisfies the requirement horovod==0.28.1", "--sdist"),
        ("all is well", "see the log"),
    ],
)
def test_failure_reason_names_the_cause(line, reason):
    assert reason in process.failure_reason(["make: started", line, "make: Leaving"])


def test_a_failed_command_shows_the_end_of_its_log(tmp_path, capsys):
    code = "import sys; print('\\n'.join(f'line {i}' for i in range(100))); print('error: broken'); sys.exit(3)"
    with pytest.raises(process.BuildError) as caught:
        process.run_logged("A test", [sys.executable, "-c", code], tmp_path / "log")
    message = str(caught.value)
    assert "exit status 3" in message
    assert "Reason: error: broken" in message
    assert "line 99" in message
    assert "line 10\n" not in message
    assert "A test" in capsys.readouterr().err


def test_long_commands_show_signs_of_life(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.2)
    code = "import time; print('[ 42%] Building x.cc.o', flush=True); print('noise', flush=True); time.sleep(4)"
    process.run_logged("A test", [sys.executable, "-c", code], tmp_path / "log")
    assert re.search(r"0m\d\ds  \[ 42%\] Building x\.cc\.o", capsys.readouterr().err)


def test_an_interruption_ends_what_was_started(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code = f"""
import pathlib, signal, sys
from dgc.build_horovod import process
signal.signal(signal.SIGTERM, signal.default_int_handler)
process.run_logged("A test", [sys.executable, "-c", {middle!r}], pathlib.Path(sys.argv[1]))
"""
    log = tmp_path / "log"
    builder = subprocess.Popen([sys.executable, "-c", code, str(log)], stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and log.read_text().strip())
    builder.terminate()
    builder.wait(300)
    wait_until(lambda: not running(int(log.read_text().split()[0])))
