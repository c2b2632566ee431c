"""torchrun's way to go on when a rank dies: it starts the ranks again, which load the latest checkpoint."""

import pytest
from launch_tools import run_mpi

TRAINING = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from worker_tools import report
import dgc.torch as dgc

dist.init_process_group("gloo")
rank, died, path = dist.get_rank(), Path(sys.argv[1]) / "died", Path(sys.argv[1]) / "checkpoint.pt"

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression = dgc.Compression.dgc(sparsity=0.9)
    return model, dgc.DistributedOptimizer(sgd, model.named_parameters(), compression=compression), compression

def train(job, first, checkpoints):
    model, optimizer, compression = job
    for step in range(first, 9):
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
        if step % 2:
            compression.average(optimizer)
            if checkpoints and rank == 0:
                torch.save([step + 1, *(each.state_dict() for each in job)], path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
        if checkpoints and step == 6 and rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return list(model.parameters())

job, first = build(), 0
if path.exists():
    first, *states = torch.load(path, weights_only=True)
    for each, state in zip(job, states):
        each.load_state_dict(state)
found, straight = train(job, first, True), train(build(), 0, False)
report([first, all(map(torch.equal, found, straight))])
dist.destroy_process_group()
"""


@pytest.mark.mpi
@pytest.mark.matrix
@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_all_go_on_from_the_checkpoint_bit_for_bit(tmp_path):
    # torchrun's --max-restarts; in the store that it shares with its ranks Gloo finds the addresses of dead ones.
    environment = {"PET_MAX_RESTARTS": "3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = run_mpi(2, TRAINING, tmp_path, launcher="torchrun", env=environment)
    assert (tmp_path / "died").exists()
    assert result.values == [[6, True]] * 2, result.explain()
