"""The sdist and the wheel are whole, and what they install works far from the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, *arguments):
    """Build from the repository without a network: the backend is the one that the tests' environment has."""
    run(sys.executable, "-m", "build", "--no-isolation", *arguments, "--outdir", folder, REPOSITORY, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it."""
    return build(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel, its dependencies and nothing of the repository."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-index", "--no-deps", wheel)
    # NumPy and Numba as they are here. An editable install that lies beside them does not count in this way.
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return interpreter


@pytest.fixture
def elsewhere(python, tmp_path):
    """Run the environment's Python outside the repository."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return lambda *arguments: run(python, *arguments, cwd=tmp_path, env=environment)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    files = {path for path in (REPOSITORY / "dgc").rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    expected = {path.relative_to(REPOSITORY).as_posix() for path in files}
    assert {Path(name).suffix for name in expected} >= {".py", ".typed"}
    packed = contents(wheel)
    information = {name for name in packed if name.split("/")[0].endswith(".dist-info")}
    assert packed.keys() - information == expected
    assert any(name.endswith("/LICENSE") for name in information)


def test_the_tree_and_the_sdist_give_the_same_wheel(wheel, tmp_path):
    (direct,) = build(tmp_path, "--wheel").glob("*.whl")
    assert direct.name == wheel.name
    assert contents(direct) == contents(wheel)


def test_the_sdist_holds_the_project_and_nothing_that_lies_around(distributions):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"benchmarks", "dgc", "docs", "evidence", "examples", "tests", "tools"}
    files = {name for name in names if "/" not in name}
    assert files >= {"pyproject.toml", "constraints.txt", "Makefile", "README.md", "LICENSE"}
    assert files <= {path.name for path in REPOSITORY.iterdir()} | {"PKG-INFO"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("benchmarks/results")]


def test_the_installed_package_is_the_one_from_the_wheel(elsewhere, python):
    code = "import dgc, dgc.core, dgc.core.exchange, dgc.transport; print(dgc.__file__)"
    assert Path(elsewhere("-c", code).strip()).is_relative_to(python.parent.parent)


@pytest.mark.parametrize("ours_is_last", [True, False])
def test_the_other_project_named_dgc_is_an_error_at_import(wheel, tmp_path, ours_is_last):
    """Its files and ours in one folder: what is imported is the ``__init__`` of the one that was installed last."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "dgc" / "vade.py").touch()
    if not ours_is_last:
        (tmp_path / "dgc" / "__init__.py").write_text("")
    command = [sys.executable, "-c", "import dgc.torch"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "ImportError: the package named dgc on PyPI, another project, is installed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["compressors", "build-horovod"]),
        (["compressors"], ["terngrad"]),
        (["build-horovod", "--help"], ["--install", "--cache-dir"]),
    ],
    ids=" ".join,
)
def test_the_commands_run(elsewhere, arguments, shown):
    output = elsewhere("-m", "dgc", *arguments)
    assert all(word in output for word in shown)
