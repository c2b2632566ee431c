"""Cases of the torch adapter's transports under any launcher."""

import hashlib
import os
import sys
import threading
import warnings

import horovod.torch as hvd
import numpy as np
from worker_tools import case, run_cases

from dgc.core.transport import Transport
from dgc.torch.engine.horovod.choice import make_transport
from dgc.torch.engine.horovod.horovod import gather_values, member_set
from dgc.torch.engine.horovod.transport import HorovodTransport
from dgc.transport.agreement import require_agreement
from dgc.transport.horovod import GATHER_BYTES, SMALL_BYTES
from dgc.transport.local import local_world
from dgc.transport.mpi import MPITransport

FRESH = "shuts Horovod down in the end"

ON_MPI = "OMPI_COMM_WORLD_SIZE" in os.environ

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
EDGES = hvd.add_process_set([0, SIZE - 1]) if SIZE > 2 else None

LENGTHS = [1, 7, 1000, SMALL_BYTES // 4 // SIZE + 1, 100_003, 2 * GATHER_BYTES // 4 // SIZE + 1]


def ranks_inputs(length, dtype, size=SIZE):
    draws = [np.random.default_rng((length, rank)) for rank in range(size)]
    return [(draw.standard_normal(length) * 10.0 ** draw.integers(-6, 6, length)).astype(dtype) for draw in draws]


def same_on_all_ranks(array):
    digests = gather_values(hashlib.sha256(array).hexdigest(), "test.same", member_set())
    return all(digest == digests[0] for digest in digests)


def raised_by(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@case
def it_is_a_transport():
    transport = HorovodTransport()
    assert isinstance(transport, Transport)
    assert (transport.rank, transport.size, transport.name) == (RANK, SIZE, "horovod")
    transport.close()


@case
def allgather_puts_rank_r_in_row_r():
    transport = HorovodTransport()
    for length in (0, 1, 100, 100_000, 3_000_000):
        out = np.zeros((SIZE, length), np.uint8)
        transport.allgather(np.full(length, RANK + 5, np.uint8), out)
        assert (out == np.arange(5, 5 + SIZE, dtype=np.uint8)[:, None]).all(), length


@case
def allgather_takes_a_read_only_message_without_a_warning():
    transport = HorovodTransport()
    out = np.zeros((SIZE, 8), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport.allgather(np.frombuffer(bytes([RANK] * 8), np.uint8), out)
    assert (out == np.arange(SIZE, dtype=np.uint8)[:, None]).all()


@case
def allreduce_is_right_and_the_same_on_every_rank():
    transport = HorovodTransport()
    for dtype in (np.float32, np.float64):
        for length in LENGTHS:
            inputs = ranks_inputs(length, dtype)
            array = inputs[RANK].copy()
            transport.allreduce(array)
            magnitude = np.sum(np.abs(np.array(inputs, np.float64)), axis=0)
            error = np.abs(array - np.sum(np.array(inputs, np.float64), axis=0))
            assert (error <= magnitude * SIZE * np.finfo(dtype).eps).all(), (dtype, length)
            assert same_on_all_ranks(array), (dtype, length)


@case
def small_sums_and_every_maximum_fold_in_rank_order():
    transport = HorovodTransport()
    for dtype in (np.float32, np.float64):
        for length in LENGTHS:
            inputs = ranks_inputs(length, dtype)
            array = inputs[RANK].copy()
            transport.allreduce(array, "max")
            assert array.tobytes() == np.maximum.reduce(inputs).tobytes()
        inputs = ranks_inputs(1000, dtype)
        array, expected = inputs[RANK].copy(), inputs[0]
        for part in inputs[1:]:
            expected = expected + part
        transport.allreduce(array)
        assert array.tobytes() == expected.tobytes()


@case
def max_keeps_a_nan_on_every_rank():
    transport = HorovodTransport()
    for length in LENGTHS:
        array = np.full(length, np.nan if RANK == SIZE - 1 else 1.0, np.float32)
        transport.allreduce(array, "max")
        assert np.isnan(array).all()


@case
def it_works_from_another_thread_beside_the_users_collectives():
    import torch

    transport = HorovodTransport()
    wrong = []

    def communicate():
        for step in range(20):
            array = np.full(30_000, step + RANK, np.float32)
            transport.allreduce(array)
            if (array != SIZE * step + SIZE * (SIZE - 1) / 2).any():
                wrong.append(step)

    thread = threading.Thread(target=communicate)
    thread.start()
    for step in range(20):
        assert hvd.allreduce(torch.ones(10) * step, name=f"user.{step % 3}", op=hvd.Sum)[0] == step * SIZE
    thread.join()
    assert wrong == []


@case
def two_transports_at_once_do_not_share_names():
    transports = [HorovodTransport(), HorovodTransport()]
    wrong = []

    def communicate(transport, value):
        try:
            for _ in range(20):
                array = np.full(50_000, value, np.float32)
                transport.allreduce(array)
                assert (array == value * SIZE).all()
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=communicate, args=pair) for pair in zip(transports, (3.0, 7.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@case("mpirun", "gloo")
def process_sets():
    if RANK not in EDGES.ranks:
        for choice in ("auto", "horovod", "mpi"):
            assert f"ConfigError: rank {RANK} is not in ProcessSet" in raised_by(make_transport, choice, EDGES)
        assert "ConfigError" in raised_by(HorovodTransport, EDGES)
    else:
        # One more transport on the members only: the next one on all ranks must still find a common name.
        for transport in (HorovodTransport(EDGES), make_transport("auto", EDGES), make_transport("horovod", EDGES)):
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


@case("mpirun", "gloo")
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


@case
def horovod_by_name():
    assert type(make_transport("horovod")) is HorovodTransport


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
def wrong_arguments_are_refused():
    transport = HorovodTransport()
    assert "TransportError" in raised_by(transport.allreduce, np.zeros(3, np.int32))
    assert "TransportError" in raised_by(transport.allreduce, np.zeros(3, np.float32), "min")
    assert "TransportError" in raised_by(transport.allgather, np.zeros(3, np.int8), np.zeros((SIZE, 3), np.uint8))


@case
def closed_twice_then_used():
    transport = HorovodTransport()
    transport.close()
    transport.close()
    assert "closed" in raised_by(transport.allreduce, np.zeros(3, np.float32))


@case
def after_shutdown_everything_is_an_error():
    transport = HorovodTransport()
    hvd.shutdown()
    assert "Horovod is shut down" in raised_by(transport.allreduce, np.zeros(3, np.float32))
    assert "call hvd.init()" in raised_by(make_transport, "auto")
    assert "call hvd.init()" in raised_by(HorovodTransport)


if __name__ == "__main__":
    run_cases()
