"""What the adapter takes from Horovod: its collectives as a transport, under every launcher, and errors in time."""

import sys
import types
from pathlib import Path

import pytest
from launch_tools import TESTS, case_names, run_mpi
from rank_jobs import each_case

torch = pytest.importorskip("torch")

import dgc.torch as dgc  # noqa: E402
from dgc.torch.horovod import HOROVOD, hold  # noqa: E402

KINDS = {
    "mpirun": {"n": 3},
    "gloo": {"n": 3, "launcher": "gloo"},
    "horovodrun": {"n": 3, "launcher": "horovodrun"},
}

test_transport = each_case(
    Path(__file__).parent / "workers" / "transport_cases.py",
    KINDS,
    more=case_names(TESTS / "transport_contract.py"),
)


# -- a Horovod that is not ready ---------------------------------------------------------------------------------

FIRST = r"^call torch\.distributed\.init_process_group\(\) .* or hvd\.init\(\) .* first; for Horovod: "
MISSING = "python -m dgc build-horovod --install"
WITHOUT = types.ModuleType("horovod.torch")
WITHOUT.is_initialized = lambda: True
NOT_READY = {
    "missing": (None, f"{FIRST}.*importing horovod.torch failed.*{MISSING}"),
    "without torch": (WITHOUT, f"{FIRST}.*built without PyTorch"),
    "not initialised": (None, r" or hvd\.init\(\) \(Horovod\) first$"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_horovod_that_is_not_ready_is_a_config_error(name, monkeypatch):
    module, message = NOT_READY[name]
    if name == "not initialised":
        pytest.importorskip("horovod")
    else:
        monkeypatch.setitem(sys.modules, "horovod.torch", module)
        if "horovod" in sys.modules:  # where another test has imported it, its attribute comes first
            monkeypatch.setattr(sys.modules["horovod"], "torch", module, raising=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: HOROVOD.make_transport("auto"),
        lambda: dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer),
        lambda: dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=dgc.Compression.dgc()),
        lambda: dgc.DistributedOptimizer(optimizer, compression=None),
    ]
    for call in calls:
        with pytest.raises(dgc.ConfigError, match=message) as caught:
            call()
        assert str(caught.value).count("init_process_group") == 1
        assert str(caught.value).count("hvd.init()") == 1


BESIDE_HOROVOD = """
import inspect
import sys
import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dgc.torch as dgc

dist.init_process_group("gloo")
inspect.getmembers(dgc.Compression)
sys.setswitchinterval(1000)  # a thread of Gloo's that waited for the GIL would abort the process at its end

def trained(compression, ddp=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    model = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not ddp:
        optimizer = dgc.DistributedOptimizer(optimizer, compression=compression)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

expected = trained(None, ddp=True)
for compression in (None, dgc.Compression.none, hvd.Compression.none):
    assert torch.equal(trained(compression), expected), compression
for compression in (dgc.Compression.fp16, hvd.Compression.fp16):
    half = trained(compression)
    assert not torch.equal(half, expected)
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=1e-2)
dist.destroy_process_group()
"""


@pytest.mark.mpi
def test_under_torchrun_dense_training_is_ddps_beside_a_horovod_that_is_not_initialised():
    run_mpi(2, BESIDE_HOROVOD, launcher="torchrun")


# -- a rank that does not come: the heartbeat ----------------------------------------------------------------------

SAVES_ALONE = """
import horovod.torch as hvd, torch
import dgc.torch as dgc
from worker_tools import report
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
try:
    for step in range(6):
        if step == 4 and hvd.rank() == 1:
            compression.average(optimizer)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
except Exception as error:
    report(f"{type(error).__name__}: {error}")
    raise
"""


@pytest.mark.mpi
def test_a_rank_that_saves_alone_ends_the_job():
    """One rank is in an allreduce of Horovod's, the other in an allgather: Horovod itself lets both wait for ever."""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    result = run_mpi(2, SAVES_ALONE, launcher="gloo", env=stall, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert "StallError: rank 0 gives up at the beginning of a step" in str(result.values[0]), result.explain()


# -- tensors that Horovod's thread may let go of -------------------------------------------------------------------

HANDING_OVER = """
import sys, time
import horovod.torch as hvd, torch
hvd.init()
from dgc.torch.horovod import Placeholders
from worker_tools import report

placeholders = Placeholders()
hvd.allreduce(torch.ones(1), name="begin")
if hvd.rank() == 1:
    time.sleep(0.3)
    sys.exit(1)
count = 0
try:
    while True:
        hvd.allreduce_async_(placeholders.take(), name=f"number.{count}")
        count += 1
except hvd.mpi_ops.HorovodInternalError:
    report(count)
"""


@pytest.mark.mpi
def test_a_rank_that_hands_over_tensors_while_another_one_ends_is_told_of_it():
    """With ``torch.ones(1)`` in the place of a placeholder the job hangs nearly always."""
    result = run_mpi(2, HANDING_OVER, check=False)
    assert not result.timed_out, result.explain()
    assert result.values[0] is not None, result.explain()


def test_a_held_tensor_has_one_reference_more():
    tensor = torch.ones(3)
    before = tensor._use_count()
    holder = hold(tensor)
    assert tensor._use_count() == before + 1
    del holder
    assert tensor._use_count() == before
