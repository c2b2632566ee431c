"""Scripts that no test starts: what they import is there, and those for a GPU run on its stand-in."""

import ast
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from fake_device import fake_kernels, needs_compiler

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("benchmarks", "examples", "tools", "evidence")
    for path in (REPOSITORY / folder).rglob("*.py")
)
SHAPES = [(64, 3, 7, 7), (64,), (100, 512)]


def missing(text):
    """What a source takes from our own packages and they do not have."""
    lacks = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(("dgc.", "evidence.")):
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(("dgc", "evidence")):
                continue  # a package that this machine lacks
            lacks.append(node.module)
            continue
        for name in node.names:
            if not hasattr(module, name.name):
                try:
                    importlib.import_module(f"{node.module}.{name.name}")
                except ModuleNotFoundError:
                    lacks.append(f"{node.module}.{name.name}")
    return lacks


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_what_a_script_imports_is_there(path):
    assert missing((REPOSITORY / path).read_text()) == []


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@needs_compiler
def test_compressors_are_timed_on_a_device(benchmarks):
    rows = benchmarks("compressors_gpu").measure(fake_kernels(), 3, SHAPES, repeats=1, warm=1)
    sent = {row["case"]: row["bytes_sent"] for row in rows}
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    assert 0 < sent["dgc 99.9 %"] < sent["dgc 75 %"] < 4 * elements <= sent["dgc, dense"]


@needs_compiler
def test_the_compress_step_is_timed_on_a_device(benchmarks, monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    module = benchmarks("compress_gpu")
    device = types.SimpleNamespace(synchronize=lambda: None)
    stand_in = types.SimpleNamespace(
        RawKernel=lambda *text: lambda *arguments: None, cuda=types.SimpleNamespace(Device=lambda: device)
    )
    monkeypatch.setattr(module, "cupy", stand_in)
    monkeypatch.setattr(module, "_topk", lambda *tensors: None)
    rows = module.measure(SHAPES, fake_kernels(), 0.001, list(module.CASES), repeats=1, warm=1)
    assert [row.case for row in rows] == ["bare update", *module.CASES]
    assert all(row.exact_share == 1.0 for row in rows)
