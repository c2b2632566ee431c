"""DGCMomentum: on 2 and 4 real ranks against Paddle's algorithm, and on one process."""

from pathlib import Path

import pytest
from rank_jobs import SIZES, each_case

pytest.importorskip("torch")

test_on_real_ranks = each_case(Path(__file__).parent / "workers" / "momentum_cases.py", SIZES)

ONE_PROCESS = """
import copy
import warnings
import horovod.torch as hvd
import torch
from worker_tools import report
import dgc.torch as dgc

hvd.init()
own, other, third = (torch.nn.Parameter(torch.linspace(-1, 1, 40_000)) for _ in range(3))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = dgc.DGCMomentum([own], 0.1, 0.9, 2, use_nesterov=True, regularization=dgc.L2Decay(0.01))
    first = dgc.DGCMomentum([third], 0.1, 0.0, 2, regularization=dgc.L1Decay(0.01))
plain = torch.optim.SGD([other], 0.1, 0.9, nesterov=True, weight_decay=0.01)
for step in range(6):
    optimizer.zero_grad()
    for p in (own, other):
        p.grad = torch.sin(torch.arange(40_000.0) + step)
    optimizer.step()
    plain.step()
expected = third.detach() - 0.1 * (1 + 0.01 * third.detach().sign())

def closure():
    first.zero_grad()
    third.sum().backward()

first.step(closure)
optimizer.load_state_dict(optimizer.state_dict())
state = copy.deepcopy(optimizer.state_dict())
state["compression"]["size"] = 2
for entry in state["compression"]["parameters"].values():
    entry["u"][...], entry["v"][...] = 2, 1
with warnings.catch_warnings(record=True) as late:
    warnings.simplefilter("always")
    optimizer.load_state_dict(state)
(loaded,) = optimizer.state_dict()["compression"]["parameters"].values()
texts = [[str(w.message) for w in each] for each in (caught, late)]
apart = [(own - other).abs().max().item(), (third - expected).abs().max().item()]
report([apart, [sorted(set(loaded[key].tolist())) for key in "uv"], *texts])
"""


@pytest.mark.mpi
def test_one_process_trains_dense_with_a_warning(ranks):
    apart, (u, v), warned, late = ranks.run(ONE_PROCESS, 1, launcher="single").values[0]
    assert max(apart) <= 1e-6
    assert "DGCMomentum with one process compresses nothing" in warned
    assert (u, v) == ([2.0], [1.0]), "of two ranks that saved"
    assert any("the loaded residuals move no parameter" in text for text in late)
