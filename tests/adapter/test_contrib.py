"""Seeds and tools use public names only. import-linter checks their imports; this file checks names on objects."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dgc"
FILES = sorted(path for path in PACKAGE.glob("**/contrib/*.py") if path.name != "__init__.py")

# Names of torch and Horovod; docs/architecture.md has the reasons.
OF_OTHERS = {
    "fuse.py": {"_foreach_copy_", "_should_synchronize"},
    "zero.py": {"_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"},
}

OVERRIDDEN = """
import importlib, json, sys
found = []
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == name:
            bases = [base for base in cls.__mro__ if base.__module__.startswith("dgc.") and base.__module__ != name]
            own = [n for n in vars(cls) if n.startswith("_") and not n.endswith("__")]
            found += [f"{cls.__name__}.{n}" for n in own if any(n in vars(base) for base in bases)]
print(json.dumps(found))
"""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(tree):
    """The names that a file defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_private_name_is_read(path):
    tree = ast.parse(path.read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(filter(is_private, read - set(own_names(tree)))) == OF_OTHERS.get(path.name, set())
    assert not [each.name for node in imports for each in node.names if is_private(each.name)]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_no_private_method_is_overridden(framework):
    pytest.importorskip(f"horovod.{framework}")
    paths = [path.relative_to(PACKAGE.parent) for path in FILES if framework in path.parts]
    modules = [".".join(path.with_suffix("").parts) for path in paths]
    shown = subprocess.run([sys.executable, "-c", OVERRIDDEN, *modules], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout.splitlines()[-1]) == []
