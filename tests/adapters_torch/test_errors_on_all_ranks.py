"""Errors that one rank meets under each launcher: every rank gets one, and none hangs."""

import re

import pytest
from launch_tools import run_mpi
from rank_jobs import once

JOINED = """
import horovod.torch as hvd, torch
from adapters_torch.workers.models import make_model, train, wrap
from worker_tools import report
import dgc.torch as dgc

hvd.init()
model = make_model()
optimizer, compression = wrap({way!r}, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sparsity=0.9)
train(optimizer, model, 2)
try:
    if hvd.rank() == 1:
        hvd.join()
    train(optimizer, model, 1, start=2)
except Exception as error:
    report([type(error).__name__, str(error)])
    raise SystemExit(3)
report("no error")
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "launcher"),
    once((way, launcher) for launcher in ("mpirun", "horovodrun", "gloo") for way in "ba"),
)
def test_a_joined_rank_ends_the_job_with_an_error(way, launcher):
    source = JOINED.format(way=way)
    stall = {} if launcher == "gloo" else {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}  # where MPI carries gradients
    result = run_mpi(2, source, launcher=launcher, env=stall, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    name, text = result.values[0]
    assert name in ("ConfigError", "TransportError", "StallError", "HorovodInternalError"), text
    assert "hvd.join" in text, result.explain()
    assert re.search(r"dgc\.torch\.join\(compression\)|join\((compression)?\) of dgc\.torch", text), result.explain()


DENSIFIED = """
import horovod.torch as hvd, torch
from worker_tools import report
import dgc.torch as dgc

hvd.init()
torch.manual_seed(0)
embedding, linear = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 50)
named = [("embedding", embedding.weight), *linear.named_parameters()]
optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
compression = dgc.Compression.dgc(sparsity=[0.9])
optimizer = dgc.DistributedOptimizer(optimizer, named, compression=compression)

def step(output):
    optimizer.zero_grad()
    output.pow(2).sum().backward()
    optimizer.step()

def output():
    return linear(torch.ones(3, 8))

for _ in range(2):
    step(output())
try:
    # The refused gradient is the first of its step.
    step(linear(embedding(torch.tensor([1, 2, 3]))) if hvd.rank() == 1 else linear(torch.ones(3, 8)))
except dgc.ConfigError as error:
    text = str(error)
compression.reset()
for _ in range(2):
    step(output())
report([text, linear.weight.sum().item()])
"""


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", once(["mpirun", "gloo"]))
def test_a_gradient_that_is_refused_at_once_reaches_all_ranks(ranks, launcher):
    result = ranks.run(DENSIFIED, 2, launcher=launcher)
    (text, own), other = result.values
    assert other == [text, own]
    assert text.startswith("rank 1 failed in step 2: 'embedding' has sparse gradients"), text


STRANGER = """
import horovod.torch as hvd, torch
from adapters_torch.workers.models import loss_of, make_model
from worker_tools import report
import dgc.torch as dgc

hvd.init()
model, stranger = make_model(), torch.nn.Linear(40, 40)
everything = [*model.named_parameters(), *((f"stranger.{n}", p) for n, p in stranger.named_parameters())]
compression = dgc.Compression.dgc(model.named_parameters(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
both = torch.optim.SGD([p for _, p in everything], lr=0.1)
optimizer = hvd.DistributedOptimizer(both, named_parameters=everything, compression=compression)
try:
    (stranger(torch.randn(4, 40)).sum() if hvd.rank() == 1 else loss_of(model, 0)).backward()
    optimizer.step()
except dgc.LayoutError as error:
    report(str(error))
"""


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", once(["mpirun", "horovodrun", "gloo"]))
def test_a_rank_whose_first_gradient_is_the_wrong_one_tells_the_others(ranks, launcher):
    result = ranks.run(STRANGER, 2, launcher=launcher)
    # The other rank finds it, too, when it has to fill in the gradient that only this one computed.
    text = r"rank [01] failed in step 0: Horovod passed a gradient that belongs to no parameter"
    assert len(result.values) == 2, result.explain()
    assert all(re.match(text, value) for value in result.values), result.explain()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "env", "options", "expected"),
    [
        ("gloo", {}, "transport='mpi'", "world of one"),
        pytest.param(
            *("mpirun", {"HOROVOD_MPI_THREADS_DISABLE": "1"}, "transport='mpi'", "MPI_THREAD_MULTIPLE"),
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["gloo", "no threads"],
)
def test_mpi_that_cannot_be_used_is_refused_on_every_rank(ranks, launcher, env, options, expected):
    source = f"""
import horovod.torch as hvd, torch
from adapters_torch.workers.models import make_model, wrap
from worker_tools import report
import dgc.torch as dgc
hvd.init()
model = make_model()
try:
    wrap("b", model, torch.optim.SGD(model.parameters(), lr=0.1), {options})
except dgc.TransportError as error:
    report(str(error))
"""
    result = ranks.run(source, 2, launcher=launcher, env=env)
    assert all(expected in text for text in result.values), result.explain()
