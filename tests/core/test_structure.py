"""The house stands: no circles of imports, few rooms in a folder, files of a readable length."""

import ast
from functools import cache
from pathlib import Path

import grimp
import pytest

import dgc

HOUSE = Path(dgc.__file__).parent

ROOMS = 8
MORE_ROOMS = {"core/kernels/cpu": 9, "torch": 10}
LINES = 400


@cache
def imports():
    """Module -> the modules it imports, deferred imports included."""
    graph = grimp.build_graph("dgc", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph):
    """Groups of modules that reach each other."""

    @cache
    def reached(start):
        seen, waiting = set(), list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        return seen

    found = {frozenset(other for other in reached(m) if m in reached(other)) for m in graph if m in reached(m)}
    return sorted(found, key=sorted)


def name_of(path):
    return path.relative_to(HOUSE).as_posix()


def folders():
    return [HOUSE, *(path for path in HOUSE.rglob("*") if path.is_dir() and path.name != "__pycache__")]


def names_imported(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


def test_the_search_finds_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": {"a", "d"}}
    assert circles(graph) == [{"b", "c"}, {"d"}]


def test_no_circles():
    assert len(imports()) > 100
    assert [sorted(circle) for circle in circles(imports())] == []


@pytest.mark.parametrize("folder", ["benchmarks", "evidence", "examples", "tools"])
def test_no_circles_among_scripts(folder):
    """Which import what lies beside them by its bare name, in whatever place."""
    for place in {path.parent for path in (HOUSE.parent / folder).rglob("*.py")}:
        found = {path.stem: names_imported(path) for path in place.glob("*.py")}
        assert circles({name: imported & set(found) for name, imported in found.items()}) == [], place


@pytest.mark.parametrize("folder", folders(), ids=lambda path: name_of(path))
def test_few_rooms(folder):
    rooms = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed") and path.suffix not in (".pyc", ".nbi", ".nbc")
    )
    assert len(rooms) <= MORE_ROOMS.get(name_of(folder), ROOMS), rooms


def test_files_of_a_readable_length():
    files = [path for path in HOUSE.rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    assert len(files) > 100
    long = [name_of(path) for path in files if len(path.read_text().splitlines()) > LINES]
    assert long == [], f"longer than {LINES} lines"
