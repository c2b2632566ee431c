"""Horovod's sources: the release, its download, and the lines edited for current frameworks."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dgc.build_horovod.process import BuildError, run_logged

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


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
    Edit(
        _TENSOR_QUEUE,
        "mutable std::mutex mutex_;",
        _ARRIVED,
        _IDLE_WHY,
    ),
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
