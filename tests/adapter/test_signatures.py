"""The constructors of ``Compression``: what help shows, and what a type checker finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import shown

import dgc

# -- a type checker ----------------------------------------------------------------------------------------------------

SETUP = """
import horovod.torch as hvd
import torch
import torch.distributed as dist
import dgc.torch as dgc
from torch.nn.parallel import DistributedDataParallel

model: torch.nn.Module = torch.nn.Linear(3, 3)
epochs = 9
loader: list[torch.Tensor] = []
"""

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"

USED = """
optimizer.synchronize()
scaler = torch.amp.GradScaler("cpu")
scaler.unscale_(optimizer)
with optimizer.skip_synchronize():
    scaler.step(optimizer)
optimizer.set_backward_passes_per_step(2)
print(optimizer.compression.stats.last.ratio, optimizer.compression.describe()["step"])
torch.optim.lr_scheduler.StepLR(optimizer, 3)
for dense in (None, dgc.Compression.none, dgc.Compression.fp16, hvd.Compression.fp16):
    dgc.DistributedOptimizer(optimizer, compression=dense, op=hvd.Average)
compression = dgc.Compression.topk(
    model.named_parameters(), optimizer, sparsity=[0.9, 0.99], rampup_step=9, exclude="*.bias", loss_scale=scaler
)
dgc.Compression.qsgd(bits=8, seed=3, min_numel=64, transport="mpi")
compression.average(optimizer)
compression.load_state_dict(compression.state_dict())
state = dgc.ddp.register(DistributedDataParallel(model), optimizer, dgc.Compression.onebit(means="row", momentum=0.9))


def others(model: torch.nn.Module) -> torch.optim.Optimizer:
    adam = dgc.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    adam.synchronize()
    adamw = torch.optim.AdamW(model.parameters())
    adamw = dgc.DistributedOptimizer(adamw, compression=dgc.Compression.dgc(steps=100))
    any_ = dgc.DistributedOptimizer(torch.optim.RMSprop(model.parameters()))
    any_.synchronize()
    adamw.synchronize()
    return adamw


try:
    optimizer.step()
except (dgc.StallError, dgc.LayoutError):
    pass
"""

MISTAKES = {
    "dgc.Compression.dgc(sparcity=0.999)": "sparcity",
    'dgc.Compression.topk(sparsity="a lot")': "sparsity",
    "dgc.Compression.powersgd()": "powersgd",
    'dgc.DistributedOptimizer(optimizer, compression="dgc")': "DistributedOptimizer",
    'dgc.Compression.dgc(values="int5")': "values",
    "dgc.Compression.qsgd(momentum=0.9)": "momentum",
    'dgc.Compression.strom(min_numel="many")': "min_numel",
    "dgc.DistributedOptimizer(optimizer, compression=dgc.Compression.topk)": "DistributedOptimizer",
    "dgc.DistributedOptimizer(optimizer, backward_passes=2)": "DistributedOptimizer",
}


@pytest.mark.matrix
@pytest.mark.slow
def test_mypy_accepts_a_users_script_and_finds_mistakes(tmp_path):
    """README's lines, with an optimizer that a variable of SGD's type holds: no error; each mistake is found."""
    assert (Path(dgc.__file__).parent / "py.typed").exists()
    blocks = [block for block in shown("../README.md", "Turn it on") if "dgc.torch" in block]
    assert [block for block in blocks if "dgc.DistributedOptimizer(" in block]
    for i, block in enumerate(blocks):
        made = "" if "optimizer = torch.optim" in block else SGD
        lines = "\n".join(line for line in block.splitlines() if not line.startswith("import"))
        used = USED if "dgc.DistributedOptimizer(" in block else ""
        (tmp_path / f"used{i}.py").write_text(f"{SETUP}{made}{lines}\n{used}")
    (tmp_path / "mistaken.py").write_text(SETUP + SGD + "\n".join(MISTAKES))
    options = ["--ignore-missing-imports", "--follow-imports=silent", "--no-error-summary"]
    # The package as an installed one; a cache outside of the folder that mypy looks at.
    environment = {**os.environ, "MYPYPATH": str(Path(dgc.__file__).parent.parent)}
    files = sorted(p.name for p in tmp_path.glob("*.py"))
    command = [sys.executable, "-m", "mypy", *options, *files]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert found.stderr == ""
    assert [e for e in errors if not e.startswith("mistaken.py")] == []
    first = len((SETUP + SGD).splitlines()) + 1
    for number, (line, word) in enumerate(MISTAKES.items(), first):
        told = [e for e in errors if e.startswith(f"mistaken.py:{number}: ")]
        assert told, (line, errors)
        assert word in told[0]
    assert len({e.split(":")[1] for e in errors}) == len(MISTAKES)  # and nothing else is one
