"""Write examples/tutorial.ipynb from docs/start.md: its script, which one cell starts on two ranks.

python tools/write_notebook.py            writes the file
python tools/write_notebook.py --check    fails if the file is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "tutorial.ipynb"

INTRO = """# dgc on two ranks, from one cell

This is the script of the first comparison (`docs/start.md`): a small network reads scanned digits, in
`DistributedDataParallel` with dgc's hook. It needs `pip install ".[torch]" scikit-learn`. Start the cell once more
after an interruption: training goes on from `checkpoint.pt`."""

CELL = """import subprocess
import sys
from pathlib import Path

Path("train.py").write_text(r'''
{script}''')
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ranks:
    for line in ranks.stdout:
        print(line, end="")"""


def script() -> str:
    """The script of the section about a first comparison."""
    page = (ROOT / "docs" / "start.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.split("## A first comparison\n")[1], re.DOTALL)[0]


def cell(kind: str, text: str) -> dict[str, Any]:
    """One cell of a notebook, without output."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": kind, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def text() -> str:
    """The whole file."""
    cells = [cell("markdown", INTRO), cell("code", CELL.format(script=script()))]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif FILE.read_text() != text():
        sys.exit(f"{FILE} is out of date: run python tools/write_notebook.py")
