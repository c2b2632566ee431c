"""The compiler is kept out of some code, and out of an import."""

import subprocess
import sys

import torch
import torch._dynamo
from torch._C._dynamo import eval_frame

from dgc.torch.untraced import untraced


def test_importing_imports_no_compiler():
    script = "import sys, dgc.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_it_stays_the_same_function():
    def own():
        return 1

    assert untraced(own) is own


def test_torch_without_marks_on_code(monkeypatch):
    monkeypatch.delattr(eval_frame, "set_code_exec_strategy", raising=False)

    @untraced
    def doubled(value):
        return 2 * value

    assert doubled(2) == 4
    assert torch.compile(lambda x: doubled(x) + 1, backend="eager")(torch.ones(1)).item() == 3.0
