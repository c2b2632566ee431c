"""An elastic job that loses a rank and gets another one; run by test_elastic.py.

Arguments: a folder with the file of hosts, the number of ranks, and how one is lost: "killed" in a step, "syncing"
(killed while the others are in the state's ``sync()``) or "discovery".
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
from worker_tools import report

import dgc.torch as dgc
import dgc.torch.elastic as elastic

folder, full, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hosts, lost = folder / "hosts", folder / "lost"
STEPS, LOST_AT, MOST = 30, 12, 2000

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Linear(200, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
state = elastic.TorchState(model, optimizer, dgc.Compression.dgc(sparsity=0.99), batch=0)


def residuals():
    """What all ranks have not sent, added up over ranks and entries."""
    own = state.compression.state_dict(own=True)["parameters"].values()
    return sum(hvd.allgather_object(float(sum(entry["v"].sum() for entry in own if "v" in entry))))


def offer(lines):
    """What the discovery script reads is there as a whole at each moment."""
    draft = folder / "draft"
    draft.write_text("".join(lines))
    draft.replace(hosts)


def lose_the_last_rank():
    if hvd.rank() < full - 1:
        return
    lost.write_text(hosts.read_text())
    if way != "discovery":
        os.kill(os.getpid(), signal.SIGKILL)
    offer(line for line in lost.read_text().splitlines(keepends=True) if os.environ["HOROVOD_HOSTNAME"] not in line)


@elastic.run
def train(state):
    with_all = state.batch + STEPS if hvd.size() == full and lost.exists() else MOST
    report({"rank": hvd.rank(), "size": hvd.size(), "batch": state.batch, "residuals": residuals()})
    while state.batch < with_all:
        if state.batch == LOST_AT and not lost.exists():
            lose_the_last_rank()
        if hvd.size() < full and way == "discovery" and hvd.rank() == 0:
            offer(lost.read_text())
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * state.batch + hvd.rank()))
        model(x).sub(x).pow(2).mean().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 5 == 0:
            report({"commits": state.batch, "residuals": residuals()})
            state.commit()
            time.sleep(0.2)
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everywhere = hvd.allgather_object(values)
    report({"identical": all(torch.equal(v, values) for v in everywhere), "size": hvd.size()})


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if way == "syncing" and not lost.exists():
        lose_the_last_rank()
    train(state)
report({"warnings": [str(w.message) for w in caught if "had not sent" in str(w.message)]})
