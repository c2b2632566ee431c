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
CODE = {PACKAGE / "build_horovod" / name for name in ("doctor.py", "sources.py")}
"""Their texts are mostly code of other programs."""
WORDS = 5
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
    """Texts of a module that are no docstrings, in their order; "…" stands for a value.

    Args:
        source: Python code.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings | parts:
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in pieces)
            if len(text.split()) >= WORDS:
                yield " ".join(text.split())


def page() -> str:
    """The page in Markdown: a heading for each area, and its messages."""
    found: dict[str, list[str]] = {area: [] for area in AREAS}
    for path in sorted(set(PACKAGE.rglob("*.py")) - CODE):
        name = path.relative_to(PACKAGE).as_posix()
        area = next(area for area in AREAS if name.startswith(f"{area}/") or not area)
        found[area] += texts(path.read_text())
    lines = ["# All messages", "", "Texts of the sources; … stands for a value.", ""]
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
