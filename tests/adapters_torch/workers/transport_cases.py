"""Cases of the torch adapter's transports under any launcher."""

import os
import sys
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from transport_contract import Carrier
from worker_tools import case

import dgc.torch as dgc
from dgc.adapter.agreement import require_agreement
from dgc.core.collectives import SMALL_BYTES
from dgc.torch.horovod import HOROVOD, HorovodTransport
from dgc.transport.framework import GATHER_BYTES
from dgc.transport.local import local_world
from dgc.transport.mpi import MPITransport

FRESH = "shuts Horovod down in the end"

ON_MPI = "OMPI_COMM_WORLD_SIZE" in os.environ

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
EDGES = hvd.add_process_set([0, SIZE - 1])

LENGTHS = [1, 7, 1000, SMALL_BYTES // 4 // SIZE + 1, 100_003, 2 * GATHER_BYTES // 4 // SIZE + 1]


def users_sum(number):
    return hvd.allreduce(torch.tensor(number), name="user", op=hvd.Sum).item()


Carrier(HorovodTransport, "horovod", LENGTHS, {1, 7, 1000}, users_sum).keep_promises()


def make_transport(choice, process_set=None):
    return HOROVOD.of(process_set).make_transport(choice)


def raised_by(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@case
def process_sets():
    if RANK not in EDGES.ranks:
        for choice in ("auto", "horovod", "mpi"):
            assert f"ConfigError: rank {RANK} is not in ProcessSet" in raised_by(make_transport, choice, EDGES)
        assert "ConfigError" in raised_by(HorovodTransport, HOROVOD.of(EDGES))
    else:
        # One more transport on the members only: the next one on all ranks must still find a common name.
        for transport in (
            HorovodTransport(HOROVOD.of(EDGES)),
            make_transport("auto", EDGES),
            make_transport("horovod", EDGES),
        ):
            place = EDGES.ranks.index(RANK)
            assert (transport.rank, transport.size) == (place, 2)
            out = np.empty((2, 3), np.uint8)
            transport.allgather(np.full(3, RANK, np.uint8), out)
            assert out[:, 0].tolist() == EDGES.ranks
            for length in (10, 40_000):
                array = np.full(length, 1.5 + RANK, np.float32)
                transport.allreduce(array)
                assert (array == 3.0 + sum(EDGES.ranks)).all()
            transport.close()
    transport = HorovodTransport()
    array = np.ones(4, np.float32)
    transport.allreduce(array)
    assert (array == SIZE).all()


@case
def auto_is_mpi_on_mpi_and_horovod_on_gloo_and_never_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport = make_transport("auto")
    assert type(transport) is (MPITransport if ON_MPI else HorovodTransport)
    assert (transport.rank, transport.size) == (RANK, SIZE)
    array = np.ones(3, np.float32)
    transport.allreduce(array)
    assert (array == SIZE).all()
    require_agreement(transport, {"momentum": 0.9}, "options")
    transport.close()


@case("mpirun", "gloo")
def mpi_by_name():
    if ON_MPI:
        transport = make_transport("mpi")
        assert type(transport) is MPITransport
        transport.close()
        return
    message = raised_by(make_transport, "mpi")
    assert message.startswith('TransportError: transport="mpi" cannot be used. rank 0: Horovod does not run on MPI'), (
        message
    )
    assert 'transport="auto" or "horovod" works here' in message
    assert "mpi4py.MPI" not in sys.modules


@case("mpirun")
def where_one_rank_lacks_mpi4py_all_fall_back_together_with_one_warning():
    reason = "rank 1: the mpi transport needs mpi4py"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if RANK == 1:
            patch.setitem(sys.modules, "mpi4py", None)
        for _ in range(2):
            assert type(make_transport("auto")) is HorovodTransport
        message = raised_by(make_transport, "mpi")
    assert message.startswith(f'TransportError: transport="mpi" cannot be used. {reason}'), message
    told = f"gradients are sent through Horovod's own collectives instead of mpi4py's: {reason}"
    assert [str(w.message).startswith(told) for w in caught] == [True] * (RANK == 0)


@case
def a_transport_is_returned_as_it_is():
    (own,) = local_world(1)
    assert make_transport(own) is own


@case
def unknown_and_differing_choices_are_errors_everywhere():
    assert raised_by(make_transport, "nccl") == (
        "ConfigError: transport must be one of auto, mpi, horovod or a Transport, rank 0 got 'nccl'"
    )
    assert raised_by(make_transport, "nccl" if RANK == 1 else "auto").endswith("rank 1 got 'nccl'")
    assert raised_by(make_transport, "horovod" if RANK else "auto") == (
        "ConfigError: the ranks ask for different transports: 'auto' on rank 0, 'horovod' on rank 1. "
        "Give every rank the same transport=..."
    )
    assert "ConfigError" in raised_by(make_transport, 3)


@case
def an_unknown_process_set_is_refused():
    stray = hvd.ProcessSet([0])
    assert "Horovod does not know ProcessSet" in raised_by(make_transport, "auto", stray)


@case
def after_shutdown_everything_is_an_error():
    transport, model = HorovodTransport(), torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression = dgc.Compression.dgc(transport="horovod")
    optimizer = dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    hvd.shutdown()
    assert "Horovod was shut down" in raised_by(transport.allreduce, np.zeros(3, np.float32))
    error = raised_by(model(torch.ones(2, 64)).sum().backward)
    assert error.startswith("TransportError: ")
    assert "Horovod was shut down: train before hvd.shutdown()" in error
    assert "hvd.init()" in raised_by(make_transport, "auto")
    assert "hvd.init()" in raised_by(HorovodTransport)
