"""The lines of start.md, pytorch.md and elsewhere.md, with a small model, on two ranks."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
from documented import shown
from launch_tools import REPOSITORY, run_mpi

pytest.importorskip("torch")

PADDLE = """
import torch
from documented import shown
from worker_tools import report

(code,) = shown("elsewhere.md", "Paddle's lines in PyTorch")
code = code.replace("num_trainers=4", "num_trainers=2")
build, iterate = code.split("optimizer.minimize")
model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 1))
exec(build)
data = torch.randn(16, 128, generator=torch.Generator().manual_seed(hvd.rank()))
for step in range(3):
    loss = model(data).square().mean()
    exec("optimizer.minimize" + iterate)
    optimizer.compression.average(optimizer)
    torch.save(optimizer.state_dict(), "/dev/null")
same = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0), name="parameters")
report([optimizer.compression.stats.steps, torch.equal(same[0], same[1])])
"""

BAGUA = """
import torch
from documented import shown
from worker_tools import report

code, _ = shown("elsewhere.md", "Bagua's fused optimizer")
code = code.replace("import dgc.torch as dgc", "import dgc.torch as dgc; hvd.init()")
model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 1))
loader = [(torch.randn(4, 12), torch.randn(4, 1)) for _ in range(3)]
loss_fn = torch.nn.functional.mse_loss
exec(code)
code_that_keeps_gradients = code.split("optimizer = dgc")[1].split("\\n", 1)[1]
exec(code_that_keeps_gradients.replace("optimizer.zero_grad()", "model.zero_grad(set_to_none=False)"))
report(dgc.is_fused_optimizer(optimizer) and all(p.grad is not None for p in model.parameters()))
"""


START = """
from worker_tools import report
model = torch.nn.Linear(64, 10)
dgc.broadcast_parameters(model.state_dict())
scaler = torch.amp.GradScaler("cpu")
compression = dgc.Compression.dgc(loss_scale=scaler)
optimizer = dgc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(), compression=compression
)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64, generator=generator)).square().mean()
"""
END = """
ranks = [torch.empty_like(model.weight.data) for _ in range(2)]
dist.all_gather(ranks, model.weight.data)
report([torch.equal(*ranks), compression.stats.steps])
compression.close()
"""


@pytest.mark.mpi
def test_the_first_lines_under_torchrun_and_those_of_mixed_precision(ranks):
    (build,) = shown("start.md", "PyTorch with torchrun")
    (scaled,) = shown("pytorch.md", "Mixed precision")
    begun = 'dist.init_process_group("gloo")'
    assert begun in build
    build = build.replace(begun, "from adapters_torch import torchrun_tools")  # which living ranks have done
    script = f"total_steps = 3\n{build}\ndel optimizer\n{START}{textwrap.indent(scaled, '    ')}\n{END}"
    assert ranks.run(script, 2, launcher="torchrun").values == [[True, 3]] * 2


SAVED = """
import torch
import torch.distributed as dist
from adapters_torch import torchrun_tools
from documented import shown
from worker_tools import report
import dgc.torch as dgc

save, load, _ = (code.replace("checkpoint.pt", PATH) for code in shown("pytorch.md", "Checkpoints"))
torch.manual_seed(0)
first = torch.nn.Linear(64, 64).state_dict()

def begun():
    model = torch.nn.Linear(64, 64)
    model.load_state_dict(first)
    compression = dgc.Compression.dgc(steps=6, min_numel=64, error_feedback=FEEDBACK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    return dict(model=model, compression=compression, optimizer=optimizer, torch=torch, dist=dist)

def train(names, begin, end):
    for step in range(begin, end):
        names["optimizer"].zero_grad()
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        names["model"](data).square().mean().backward()
        names["optimizer"].step()

unbroken = begun()
train(unbroken, 0, 3)
exec(save, unbroken)
train(unbroken, 3, 5)
unbroken["compression"].close()
dist.barrier()
resumed = begun()
exec(load, resumed)
train(resumed, 3, 5)
values = [names["model"].weight.detach().clone() for names in (unbroken, resumed)]
moved = not torch.equal(torch.load(PATH)["model"]["weight"], values[0])
train(resumed, 5, 6)  # the last of steps= makes the ranks equal
both = [torch.empty(64, 64) for _ in range(2)]
dist.all_gather(both, resumed["model"].weight.detach())
report([torch.equal(*values), moved, torch.equal(*both)])
resumed["compression"].close()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("feedback", ["step-ahead", "classic"])
def test_the_lines_of_checkpoints_resume_bit_for_bit(ranks, tmp_path, feedback):
    script = f"PATH, FEEDBACK = {str(tmp_path / 'own.pt')!r}, {feedback!r}\n{SAVED}"
    assert ranks.run(script, 2, launcher="torchrun").values == [[True, True, True]] * 2


@pytest.mark.mpi
@pytest.mark.matrix
def test_the_first_script_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("sklearn")
    (code,) = shown("start.md", "A first comparison")
    script = tmp_path / "train.py"
    checkpoint = tmp_path / "checkpoint.pt"
    code = code.replace('"checkpoint.pt"', repr(str(checkpoint)))

    def epochs(count):
        script.write_text(code.replace("epochs, start = 20, 0", f"epochs, start = {count}, 0"))
        output = run_mpi(2, script, launcher="torchrun").stdout
        return dict(re.findall(r"epoch +(\d+): (.*)", output))

    unbroken = epochs(3)
    checkpoint.unlink()
    assert sorted(unbroken) == ["1", "2", "3"]
    assert sorted(epochs(2)) == ["1", "2"]
    assert epochs(3) == {"3": unbroken["3"]}


@pytest.mark.mpi
def test_one_cell_of_the_notebook_trains_on_two_ranks(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    subprocess.run([sys.executable, REPOSITORY / "tools" / "write_notebook.py", "--check"], check=True)
    cells = json.loads((REPOSITORY / "examples" / "tutorial.ipynb").read_text())["cells"]
    (code,) = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    exec(code.replace("epochs, start = 20, 0", "epochs, start = 2, 0"), {})
    written = capsys.readouterr().out
    assert "epoch  2: accuracy" in written, written
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_line_that_declares_an_optimizer():
    import torch

    import dgc.torch as dgc

    class Lion(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 1))
    names = {"dgc": dgc, "model": model, "Lion": Lion}
    _, code = shown("elsewhere.md", "Bagua's fused optimizer")
    exec(code, names)
    model(torch.ones(2, 12)).sum().backward()
    names["optimizer"].fuse_step()
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1


@pytest.mark.mpi
def test_paddles_lines(ranks):
    assert ranks.run(PADDLE, 2).values == [[3, True]] * 2


@pytest.mark.mpi
def test_baguas_lines(ranks):
    assert ranks.run(BAGUA, 2).values == [True] * 2
