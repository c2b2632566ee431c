"""The compiler is kept out of some code, and out of an import."""

import subprocess
import sys
import types

import pytest
import torch
import torch._dynamo
from torch._C._dynamo import eval_frame

from dgc.torch.engine.step.untraced import leave_hooks_untraced, untraced


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


@pytest.mark.parametrize("marks", [True, False])
def test_hooks_of_horovods_optimizers_are_made_untraced(marks, monkeypatch):
    class Optimizer:
        def _make_hook(self, p):
            def hook(*ignored):
                seen.append(torch.compiler.is_compiling())
                return (self, p)

            return hook

    seen = []
    module = types.ModuleType("horovod.torch.optimizer")
    module._DistributedOptimizer = Optimizer
    for name, stand_in in (("horovod.torch", types.SimpleNamespace(optimizer=module)), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    if not marks:
        monkeypatch.delattr(eval_frame, "set_code_exec_strategy", raising=False)
    leave_hooks_untraced()
    once = Optimizer._make_hook
    leave_hooks_untraced()
    assert Optimizer._make_hook is once
    optimizer = Optimizer()
    hook = optimizer._make_hook("p")
    assert hook(None) == (optimizer, "p")

    def passes(x):
        x = x * 2
        x.register_hook(lambda gradient: None if hook(gradient) else gradient)
        return x.sum()

    torch.compile(lambda x: passes(x).backward(), backend="eager")(torch.ones(3, requires_grad=True))
    assert seen == [False, False]
