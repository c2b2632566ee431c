"""Step-ahead error feedback on more ranks than the cases have."""

import pytest
import torch
from launch_tools import run_mpi

from dgc.torch.step_ahead import _decays

FIVE = """
import torch
import torch.distributed as dist
import dgc.torch as dgc

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
compression = dgc.Compression.dgc(steps=20)
optimizer = dgc.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
for step in range(20):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
ends = [torch.empty_like(model[0].weight) for _ in range(5)]
dist.all_gather(ends, model[0].weight.detach())
if dist.get_rank() == 0:
    print(f"density {compression.describe()['density']:.3f}, equal {all(end.equal(ends[0]) for end in ends)}")
dist.destroy_process_group()
"""


@pytest.mark.mpi
@pytest.mark.matrix
def test_more_than_four_ranks_send_more():
    assert "density 0.100, equal True" in run_mpi(5, FIVE, launcher="torchrun").stdout


@pytest.mark.parametrize(
    ("name", "share"),
    [("AdamW", 0.02), ("Muon", 0.02), ("Adafactor", 0.02), ("Adam", 0.0), ("RMSprop", 0.0), ("NAdam", 0.0)],
)
def test_the_decay_that_shortens_parameters_is_known(name, share):
    """With a gradient of 0, decoupled decay alone moves a parameter."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this PyTorch has no {name}")
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(torch.optim, name)([p], lr=0.1, weight_decay=0.2)
    p.grad = torch.zeros_like(p)
    (found,) = _decays(optimizer, [p])
    assert found == pytest.approx(share)
    optimizer.step()
    if share:
        torch.testing.assert_close(p.detach(), torch.full((4, 4), 1 - share))
