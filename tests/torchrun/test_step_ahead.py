"""Step-ahead error feedback on more ranks than the cases have."""

import pytest
import torch
from launch_tools import run_mpi

from dgc.torch.step_ahead import _decays

FOUR = """
import copy
import torch
import torch.distributed as dist
import dgc.torch as dgc

dist.init_process_group("gloo")
rank = dist.get_rank()

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compression = dgc.Compression.dgc(steps=40, error_feedback="step-ahead", late=LATE)
    optimizer = dgc.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
    return model, optimizer, compression

def train(model, optimizer, first, stop):
    for step in range(first, stop):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        (model(torch.randn(8, 64)) - rank).square().mean().backward()
        optimizer.step()
        assert not optimizer.compression.engine.exchange.edited

def weights(model):
    return [p.detach().clone() for p in model.parameters()]

def same(ones, others):
    return all(map(torch.equal, ones, others))

def on_all(tensors):
    gathered = [None] * 4
    dist.all_gather_object(gathered, tensors)
    return all(same(tensors, others) for others in gathered)

straight, optimizer, compression = build()
train(straight, optimizer, 0, 6)
compression.engine.require_between_steps("a look")  # ends a late exchange
assert f"{compression.describe()['density']:.3f}" == "0.032", "more than two ranks send more"
ahead = compression.engine.ahead
tensor = ahead.tensors[0]
felt = (straight[0].weight.detach().flatten() - tensor.theta).view(4, 1024)
wanted = tensor.a.view(4, 1024) * tensor.shares[:, None]
assert tensor.a.any() and (tensor.shares < 1).any(), tensor.shares
torch.testing.assert_close(felt, wanted, rtol=0, atol=1e-6)
torch.testing.assert_close(tensor.shares * tensor.factors, torch.ones(4))
assert on_all(ahead.shared) and not on_all(weights(straight))
compression.average(optimizer)
saved = copy.deepcopy([straight.state_dict(), optimizer.state_dict(), compression.state_dict()])
train(straight, optimizer, 6, 12)
resumed, optimizer, compression = build()
for each, state in zip((resumed, optimizer, compression), saved):
    each.load_state_dict(state)
assert same(weights(resumed), saved[0].values())
train(resumed, optimizer, 6, 12)
assert same(weights(resumed), weights(straight))
compression.average()
assert on_all(weights(resumed))
print(f"rank {rank} is right")
dist.destroy_process_group()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("late", [False, True])
def test_four_ranks_with_factors_for_pieces_resume_bit_for_bit(late):
    out = run_mpi(4, FOUR.replace("LATE", str(late)), launcher="torchrun").stdout
    assert sum(f"rank {rank} is right" in out for rank in range(4)) == 4


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
