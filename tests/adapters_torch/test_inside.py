"""What "Watch a run" in docs/pytorch.md shows, on real ranks."""

import pytest

pytest.importorskip("torch")

SHOWN = """
import sys, types
import torch, torch.distributed as dist
from adapters_torch import torchrun_tools
import dgc.torch as dgc
from documented import shown
from worker_tools import report

rank, wrote, logged = dist.get_rank(), [], []

class SummaryWriter:
    def __init__(self, folder):
        self.add_scalar = lambda *scalar: wrote.append(scalar)

sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
wandb = types.SimpleNamespace(log=logged.append)

def trained(compression):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + step + rank)).square().mean().backward()
        optimizer.step()
    return model.weight.detach()

plain = trained(dgc.Compression.dgc(sparsity=0.9))
compression = dgc.Compression.dgc(sparsity=0.9)
exec("\\n".join(shown("pytorch.md", "TensorBoard")), globals())
compression.on_step(wandb.log)
same = torch.equal(trained(compression), plain)
last = compression.stats.last
report([same, [(tag, step) for tag, _, step in wrote], dict((tag, value) for tag, value, _ in wrote), len(logged)])
report([last.ratio, last.density, last.bytes_sent, logged[0]])
del sys.modules["torch.utils.tensorboard"]
"""


@pytest.mark.mpi
def test_the_shown_lines_write_the_steps_figures(ranks):
    first, other = ranks.run(SHOWN, 2, launcher="torchrun").reports
    (same, tags, values, logged), (ratio, density, sent, figures) = first
    assert same, "a hook changes no bit"
    each = ("compression/ratio", "compression/density", "compression/bytes_sent")
    expected = [[tag, step] for step in range(3) for tag in each]
    expected.insert(3, ["compression/residual_norm", 0])
    assert [list(pair) for pair in tags] == expected
    assert [values[tag] for tag in each] == [ratio, density, sent]
    assert values["compression/residual_norm"] > 0
    assert logged == 3
    assert (figures["step"], figures["refused"], figures["bytes_sent"] > 0) == (0, False, True)
    assert set(figures["seconds"]) == {"compress", "exchange", "apply", "wait", "write"}
    assert other[0][0], "the rank that asked for nothing trains alike"
    assert other[0][1] == []
