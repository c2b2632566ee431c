"""DGCMomentum: on 2 and 4 real ranks against Paddle's algorithm, on one process, and with a rank that has joined."""

from pathlib import Path

import pytest
from rank_jobs import SIZES, each_case, once

pytest.importorskip("torch")

WORKER = Path(__file__).parent / "workers" / "optimizer_cases.py"


test_on_real_ranks = each_case(WORKER, SIZES)


@pytest.mark.mpi
@pytest.mark.parametrize("name", once(["resume_continues_bit_for_bit", "entries_sent_follow_the_rampup"]))
def test_without_mpi(ranks, name):
    ranks(WORKER, 2, launcher="gloo").check(name)


ONE_PROCESS = """
import warnings
import horovod.torch as hvd
import torch
from worker_tools import report
from dgc.adapter.paddle import L2Decay
from dgc.torch.momentum.optimizer import DGCMomentum

hvd.init()
own, other = (torch.nn.Parameter(torch.linspace(-1, 1, 40_000)) for _ in range(2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = DGCMomentum([own], 0.1, 0.9, 2, use_nesterov=True, regularization=L2Decay(0.01))
plain = torch.optim.SGD([other], 0.1, 0.9, nesterov=True, weight_decay=0.01)
for step in range(6):
    for p in (own, other):
        p.grad = torch.sin(torch.arange(40_000.0) + step)
    optimizer.step()
    plain.step()
report([(own - other).abs().max().item(), [str(w.message) for w in caught], optimizer.state_dict()["step"]])
"""


@pytest.mark.mpi
def test_one_process_trains_dense_with_a_warning(ranks):
    difference, warned, step = ranks.run(ONE_PROCESS, 1, launcher="single").values[0]
    assert difference <= 1e-6
    assert warned == ["DGCMomentum with one process compresses nothing"]
    assert step == 6


JOINED = """
import horovod.torch as hvd
import torch
from worker_tools import report
from dgc.errors import ConfigError
from dgc.torch.momentum.optimizer import DGCMomentum

hvd.init()
p = torch.nn.Parameter(torch.zeros(20_000))
optimizer = DGCMomentum([p], 0.1, 0.9, 0)
p.grad = torch.ones_like(p)
optimizer.step()
if hvd.rank() == 1:
    hvd.join()
else:
    try:
        optimizer.step()
    except ConfigError as error:
        report(str(error))
    hvd.join()
"""


@pytest.mark.mpi
def test_a_joined_rank_is_an_error_and_no_hang(ranks):
    assert "a rank has joined" in ranks.run(JOINED, 2, launcher="gloo").values[0]
