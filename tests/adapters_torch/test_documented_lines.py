"""The lines of start.md, pytorch.md and elsewhere.md, with a small model, on two ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import shown
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import TORCHRUN, each_case

pytest.importorskip("torch")

test_lines_under_torchrun = each_case(Path(__file__).parent / "workers" / "shown_lines_cases.py", TORCHRUN)

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
def test_baguas_lines(ranks):
    assert ranks.run(BAGUA, 2).values == [True] * 2
