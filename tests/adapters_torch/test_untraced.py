"""The compiler is kept out of some code, and out of an import."""

import subprocess
import sys
import types

import torch
import torch._dynamo
from torch._C._dynamo import eval_frame

from dgc.torch.untraced import leave_hooks_untraced, untraced


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


def test_hooks_of_horovods_optimizers_are_untraced(monkeypatch):
    class Optimizer:
        def _make_hook(self, p):
            def hook(*ignored):
                seen.append((p, torch.compiler.is_compiling()))

            return hook

    seen = []
    module = types.ModuleType("horovod.torch.optimizer")
    module._DistributedOptimizer = Optimizer
    for name, stand_in in (("horovod.torch", types.SimpleNamespace(optimizer=module)), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    leave_hooks_untraced()
    made = Optimizer._make_hook
    leave_hooks_untraced()
    assert Optimizer._make_hook is made
    x = torch.ones(3, requires_grad=True)
    accumulator = x.expand_as(x).grad_fn.next_functions[0][0]  # as Horovod registers them
    accumulator.register_hook(Optimizer()._make_hook("p"))
    torch.compile(lambda: (x * 2).sum().backward(), backend="eager")()
    assert seen == [("p", False)]
