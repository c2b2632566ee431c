"""What the pages of docs/ show: a compressor, and lines to change. And the package's own names. For workers too."""

import re
import sys
import types
from pathlib import Path

from dgc.core.compressors import compressor_class, compressor_names


def documented_compressor():
    """Run the example of docs/add-a-compressor.md, which registers a compressor; returns its code and its name."""
    text = (Path(__file__).parent.parent / "docs" / "add-a-compressor.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    name = re.search(r'name = "(\w+)"', code).group(1)
    if name not in compressor_names():
        # A module of its own, as a user's file would be; dataclasses look it up.
        module = sys.modules["add_a_compressor"] = types.ModuleType("add_a_compressor")
        exec(compile(code, "add-a-compressor.md", "exec", dont_inherit=True), module.__dict__)
    return code, name


def shown(page, heading):
    """The code under a heading of docs/<page>, block by block; of a diff, what it leaves."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    level, rest = re.split(rf"^(##+) {re.escape(heading)}\n", text, maxsplit=1, flags=re.MULTILINE)[1:]
    section = re.split(rf"^#{{2,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = []
    for kind, block in re.findall(r"```(diff|python)\n(.*?)```", section, re.DOTALL):
        lines = block.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        blocks.append("\n".join(lines))
    return blocks


def own_names():
    """The package's compressors, without those that a test registered."""
    return [name for name in compressor_names() if compressor_class(name).number < 128]
