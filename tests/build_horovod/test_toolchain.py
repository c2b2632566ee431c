"""The parts of tools/build_horovod.py that need neither a network nor a compiler."""

import fcntl
import hashlib
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import build_horovod as tool
import pytest

EDIT = tool.Edit("CMakeLists.txt", "set(STANDARD 14)", "set(STANDARD 17)", "a test")


def write_sources(root, **replaced):
    """Write files holding the lines that the edits look for; `replaced` exchanges the text of some."""
    for edit in tool.EDITS:
        path = root / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.name, f"first\n    {edit.old}\nlast\n"))


def wait_until(condition, seconds=30):
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


def test_substitute_replaces_one_line_and_keeps_the_rest():
    text = "a\n  set(STANDARD 14)\r\nset(STANDARD 14) # not the same line\nb"
    assert tool.substitute(text, EDIT) == "a\n  set(STANDARD 17)\r\nset(STANDARD 14) # not the same line\nb"


@pytest.mark.parametrize(("text", "times"), [("", 0), ("set(STANDARD 17)\n", 0), ("set(STANDARD 14)\n" * 2, 2)])
def test_substitute_refuses_other_sources(text, times):
    with pytest.raises(tool.BuildError, match=rf"CMakeLists\.txt: expected .* found it {times} times"):
        tool.substitute(text, EDIT)


def test_apply_edits_changes_every_file(tmp_path):
    write_sources(tmp_path)
    tool.apply_edits(tmp_path)
    for edit in tool.EDITS:
        assert (tmp_path / edit.path).read_text() == f"first\n    {edit.new}\nlast\n"


def test_two_edits_of_one_file_both_hold(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("set(STANDARD 14)\nset(OTHER 1)\n")
    other = tool.Edit("CMakeLists.txt", "set(OTHER 1)", "set(OTHER 2)", "a test")
    tool.apply_edits(tmp_path, (EDIT, other))
    assert (tmp_path / "CMakeLists.txt").read_text() == "set(STANDARD 17)\nset(OTHER 2)\n"


def test_apply_edits_is_all_or_nothing(tmp_path):
    write_sources(tmp_path, **{"xla_mpi_ops.cc": "another version\n"})
    before = (tmp_path / "CMakeLists.txt").read_text()
    with pytest.raises(tool.BuildError, match="xla_mpi_ops"):
        tool.apply_edits(tmp_path)
    assert (tmp_path / "CMakeLists.txt").read_text() == before


def test_a_missing_file_is_named(tmp_path):
    write_sources(tmp_path)
    (tmp_path / "horovod/torch/CMakeLists.txt").unlink()
    with pytest.raises(tool.BuildError, match=r"horovod/torch/CMakeLists\.txt is missing"):
        tool.apply_edits(tmp_path)


def test_digest_follows_edits_and_options():
    digests = {
        tool.recipe_digest(tool.EDITS, {}),
        tool.recipe_digest(tool.EDITS[:2], {}),
        tool.recipe_digest(tool.EDITS, {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        tool.recipe_digest(tool.EDITS, {"HOROVOD_GPU_OPERATIONS": "MPI"}),
    }
    assert len(digests) == 4


def test_only_build_variables_steer_the_build():
    environ = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "3", "HOME": "/", "HOROVOD_NCCL_HOME": "/n"}
    assert tool.user_options(environ) == {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/n"}


def make_toolchain(**changes):
    values = {
        "torch": "2.13.0", "tensorflow": None, "mpi": "openmpi4.1.8", "mpicxx": Path("/usr/bin/mpicxx"),
        "cmake": Path("cmake"), "cmake_version": (4, 0, 0), "compiler": Path("c++"), "compiler_version": "c++ 12",
        "jobs": 3, **changes,
    }  # fmt: skip
    return tool.Toolchain(**values)


def test_cache_key_names_every_version():
    key = tool.cache_key(make_toolchain(), {})
    for part in ("horovod0.28.1", "torch2.13.0", "openmpi4.1.8", f"py{sys.version_info.major}."):
        assert part in key
    assert "tf" not in key
    assert "/" not in key


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"tensorflow": "2.21.0"}, {"mpi": "openmpi4.1.7"}])
def test_cache_key_changes_with_versions(change):
    assert tool.cache_key(make_toolchain(**change), {}) != tool.cache_key(make_toolchain(), {})


def test_build_environment_agrees_with_what_was_found(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    monkeypatch.setenv("MAKEFLAGS", "w --jobserver-auth=3,4")
    environment = tool.build_environment(make_toolchain(), {"HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITH_MPI"] == "1"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environment
    assert environment["MAKEFLAGS"] == "-j3"
    assert environment["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_run_paths_of_the_environment_become_relative():
    prefix = Path("/env")
    origin = prefix / "lib/python3.11/site-packages/horovod/torch"
    runpath = "/env/lib:/env/lib:/usr/lib/mpi:/env/lib/python3.11/site-packages/torch/lib"
    assert tool.relocatable_runpath(runpath, prefix, origin).split(":") == [
        "$ORIGIN/../../../..",
        "/usr/lib/mpi",
        "$ORIGIN/../../torch/lib",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("cannot write: No space left on device", "TMPDIR"),
        ("x.cc:1:10: fatal error: nope.h: No such file or directory", "nope.h"),
        ("all is well", "see the log"),
    ],
)
def test_failure_reason_names_the_cause(line, reason):
    assert reason in tool.failure_reason(["make: started", line, "make: Leaving"])


def test_a_failed_command_shows_the_end_of_its_log(tmp_path, capsys):
    code = "import sys; print('\\n'.join(f'line {i}' for i in range(100))); print('error: broken'); sys.exit(3)"
    with pytest.raises(tool.BuildError) as caught:
        tool.run_logged("A test", [sys.executable, "-c", code], tmp_path / "log")
    message = str(caught.value)
    assert "exit status 3" in message
    assert "Reason: error: broken" in message
    assert "line 99" in message
    assert "line 10\n" not in message
    assert "A test" in capsys.readouterr().err


def test_long_commands_show_signs_of_life(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "HEARTBEAT_SECONDS", 0.2)
    code = "import time; print('[ 42%] Building x.cc.o', flush=True); print('noise', flush=True); time.sleep(4)"
    tool.run_logged("A test", [sys.executable, "-c", code], tmp_path / "log")
    assert re.search(r"0m\d\ds  \[ 42%\] Building x\.cc\.o", capsys.readouterr().err)


def test_wrong_sources_are_refused(tmp_path):
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    sdist.write_bytes(b"something else")
    with pytest.raises(tool.BuildError, match="SHA-256"):
        tool.fetch_sources(tmp_path, sdist, tmp_path / "log")


def test_an_interruption_ends_what_was_started(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code = f"""
import pathlib, signal, sys
import build_horovod as t
signal.signal(signal.SIGTERM, signal.default_int_handler)
t.run_logged("A test", [sys.executable, "-c", {middle!r}], pathlib.Path(sys.argv[1]))
"""
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], cwd=Path(tool.__file__).parent, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: log.exists() and log.read_text().strip())
    process.terminate()
    process.wait(30)
    wait_until(lambda: not running(int(log.read_text().split()[0])))


@pytest.mark.parametrize(
    ("record", "same"),
    [
        ('{"archive_info": {"hashes": {"sha256": "%s"}}}' % hashlib.sha256(b"a wheel").hexdigest(), True),  # noqa: UP031
        ('{"archive_info": {"hashes": {"sha256": "00"}}}', False),
        ('{"dir_info": {}}', False),
        (None, False),
    ],
)
def test_an_installed_wheel_is_recognised(tmp_path, monkeypatch, record, same):
    wheel = tmp_path / "horovod.whl"
    wheel.write_bytes(b"a wheel")
    monkeypatch.setattr(
        tool.importlib.metadata, "distribution", lambda name: types.SimpleNamespace(read_text=lambda file: record)
    )
    assert tool.is_installed(wheel) is same


def test_a_second_build_waits_for_the_first(tmp_path, capsys):
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = "import sys, pathlib, build_horovod as t\nwith t.locked(pathlib.Path(sys.argv[1])):\n  print('has it')\n"
        second = subprocess.Popen(
            [sys.executable, "-c", code, str(lock)], cwd=Path(tool.__file__).parent,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "waiting" in second.stderr.readline()
        assert second.poll() is None
    out, _ = second.communicate(timeout=30)
    assert out == "has it\n"


@pytest.mark.parametrize(
    ("without", "hidden", "message"),
    [
        ({"torch", "tensorflow"}, None, "Neither PyTorch nor TensorFlow"),
        (set(), "mpicxx", "No MPI found"),
        (set(), "cmake", "No CMake found"),
        (set(), "c\\+\\+|g\\+\\+|clang\\+\\+", "No C\\+\\+ compiler"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, without, hidden, message):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(tool, "distribution_version", lambda *names: "1.0")
    monkeypatch.setattr(
        tool, "find_command", lambda name: None if hidden and re.fullmatch(hidden, name) else Path("/bin/true")
    )
    monkeypatch.setattr(tool, "find_mpi", tool.find_mpi if hidden == "mpicxx" else lambda: ("openmpi4.1.8", Path("m")))
    if hidden != "c\\+\\+|g\\+\\+|clang\\+\\+":
        monkeypatch.setattr(tool, "find_compiler", lambda: (Path("c++"), "c++ 12"))
    with pytest.raises(tool.BuildError, match=message):
        tool.detect(without, jobs=1)


def test_the_command_line_reports_errors_without_a_traceback():
    done = subprocess.run(
        [sys.executable, tool.__file__, "--without", "torch", "--without", "tensorflow"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: Neither PyTorch nor TensorFlow")
    assert "Traceback" not in done.stderr
