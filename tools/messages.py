"""The site's page of all messages, made from the sources when the site is built (a hook of MkDocs)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PACKAGE = Path(__file__).resolve().parents[1] / "dgc"
PAGE = "messages.md"
WORDS = 4
"""A text with fewer is a part of a message, or none."""

AREAS = {
    "build_horovod": ("Installation", "get-started.md"),
    "torch/zero": ("ZeroRedundancyOptimizer", "zero.md"),
    "torch/fuse": ("fuse_optimizer", "from-bagua.md"),
    "torch/momentum": ("DGCMomentum for PyTorch", "from-paddle.md"),
    "tensorflow/keras/momentum": ("DGCMomentum for Keras", "from-paddle.md"),
    "adapter/paddle": ("DGCMomentum", "from-paddle.md"),
    "torch/checkpoint": ("Checkpoints of PyTorch", "checkpoints.md"),
    "core/state": ("Saved states", "checkpoints.md"),
    "torch": ("PyTorch", "get-started.md"),
    "tensorflow": ("TensorFlow and Keras", "tensorflow.md"),
    "transport": ("Ranks and transports", "troubleshooting.md"),
    "core/kernels": ("Kernels and GPUs", "gpu.md"),
    "core/wire": ("Messages between ranks", "wire-format.md"),
    "core/config": ("Options", "compressors.md"),
    "core/compressors": ("Compressors", "compressors.md"),
    "": ("Every framework", "troubleshooting.md"),
}
"""A folder of the package, its heading, and the page that explains what its messages speak of; the first that fits."""


def texts(source: str) -> Iterator[str]:
    """Texts of what a module raises and warns of, in their order; "…" stands for a value.

    A constant or a function that a ``raise`` or a warning names counts with its own texts.

    Args:
        source: Python code.
    """
    tree = ast.parse(source)
    named: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            named[node.name] = ast.Module([part for part in node.body if not _is_docstring(part)], [])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node.func) in ("warn", "warning")):
            mentioned = {_name(part) for part in ast.walk(node)} & named.keys()
            for part in (node, *(named[name] for name in sorted(mentioned))):
                yield from _literals(part)


def _name(node: ast.AST) -> str:
    """Of a variable or an attribute; "" of anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _literals(tree: ast.AST) -> Iterator[str]:
    """Texts of at least :data:`WORDS` words."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [] if id(node) in inner else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        if len(text.split()) >= WORDS:
            yield " ".join(text.split())


def page() -> str:
    """The page in Markdown: a heading for each area, and its messages."""
    found: dict[str, list[str]] = {area: [] for area in AREAS}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        area = next(area for area in AREAS if name.startswith(f"{area}/") or not area)
        found[area] += texts(path.read_text())
    lines = ["# All messages", "", "From the sources; … stands for a value. Each says what to do.", ""]
    for area, messages in found.items():
        heading, explained = AREAS[area]
        lines += [f"## {heading}", "", f"Explained in [{explained}]({explained}).", ""]
        lines += [f"- `{text.replace('`', chr(39))}`" for text in dict.fromkeys(messages)] + [""]
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files
