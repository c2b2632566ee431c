"""Cases of the mpi transport on real ranks; any number of ranks."""

import numpy as np
import pytest
from mpi4py import MPI
from transport_contract import Carrier
from worker_tools import SkipCase, case, launch_rank, launch_size

from dgc.core.collectives import SMALL_BYTES
from dgc.errors import TransportError
from dgc.transport.mpi import CHUNK_BYTES, MPITransport, why_unusable

FRESH = "finalizes MPI in the end"

RANK, SIZE = launch_rank(), launch_size()

# Around every change of method: one round, one chunk, several chunks, chunks that P does not divide.
LENGTHS = [1, 2, 3, 1000, SMALL_BYTES // 4 // SIZE + 1, CHUNK_BYTES // 4 + SIZE + 1, 3 * CHUNK_BYTES // 4 + 7]

Carrier(
    lambda: MPITransport(expect_rank=RANK, expect_size=SIZE), "mpi", LENGTHS, LENGTHS, MPI.COMM_WORLD.allreduce
).keep_promises()


def refuses(message, function, *args, **options):
    with pytest.raises(TransportError) as caught:
        function(*args, **options)
    assert message in str(caught.value)


@case("2ranks")
def ranks_that_do_different_things_are_told_so():
    """One in a step, one that saves: with more than two, some would wait for those that failed."""
    transport = MPITransport()
    length = 24 if RANK == 0 else 3000
    told = ""
    try:
        transport.allgather(np.zeros(length, np.uint8), np.empty((SIZE, length), np.uint8))
    except TransportError as error:
        told = str(error)
    assert any("and the same loads, in the same order" in text for text in MPI.COMM_WORLD.allgather(told)), told
    transport.close()


@case
def a_subgroup_is_collective_over_its_members_only():
    if SIZE < 3:
        raise SkipCase("needs 3 ranks")
    members = [SIZE - 1, 0]
    if RANK in members:
        transport = MPITransport(expect_rank=RANK, expect_size=SIZE, ranks=members)
        assert (transport.rank, transport.size) == (members.index(RANK), 2)
        out = np.empty((2, 1), np.uint8)
        transport.allgather(np.full(1, RANK, np.uint8), out)
        assert out[:, 0].tolist() == members
        transport.close()
    else:
        refuses(f"rank {RANK} is not in the process set", MPITransport, ranks=members)


@case
def impossible_subgroups_are_refused():
    refuses("distinct ranks", MPITransport, ranks=[0, 0])
    refuses("distinct ranks", MPITransport, ranks=[0, SIZE])


@case
def another_rank_or_size_than_horovods_is_refused():
    wrong_rank = {"expect_rank": RANK + 1}
    for options in ({"expect_size": SIZE + 1}, wrong_rank, {**wrong_rank, "expect_size": SIZE}):
        refuses("Under horovodrun --gloo mpi4py sees a world of one", MPITransport, **options)
    refuses('transport="horovod" works there', MPITransport, expect_size=SIZE + 1)


@case
def mpi_without_threads_is_refused():
    class Serialized:
        THREAD_MULTIPLE = MPI.THREAD_MULTIPLE
        Is_initialized = staticmethod(lambda: True)
        Is_finalized = staticmethod(lambda: False)
        Query_thread = staticmethod(lambda: MPI.THREAD_SERIALIZED)

    reason = why_unusable(Serialized, MPI.COMM_WORLD)
    assert "MPI_THREAD_MULTIPLE" in reason
    assert "HOROVOD_MPI_THREADS_DISABLE" in reason
    assert why_unusable(MPI, MPI.COMM_WORLD, RANK, SIZE) is None


@case
def large_collectives_of_different_sizes_are_an_error_everywhere():
    transport = MPITransport()
    length = 10 * SMALL_BYTES + RANK
    out = np.empty((SIZE, length), np.uint8)
    refuses("different sizes", transport.allgather, np.zeros(length, np.uint8), out)
    refuses("different sizes", transport.allreduce, np.zeros(length, np.float32))
    transport.close()


@case("2ranks")
def a_message_to_a_rank_that_has_closed_reaches_no_later_communicator():
    transport = MPITransport()
    if RANK == 0:
        transport.close()
    MPI.COMM_WORLD.Barrier()
    if RANK == 1:
        late = transport._comm.Iallgather(np.ones(1, np.int64), np.zeros(2, np.int64))
        transport.close()
    MPI.COMM_WORLD.Barrier()
    MPITransport(ranks=[RANK]).close()  # a message from rank 1 would end rank 0's process here
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        transport._comm.Iallgather(np.zeros(1, np.int64), np.zeros(2, np.int64)).Wait()
    else:
        late.Wait()


@case
def an_error_of_mpi_is_a_transport_error():
    class Failing:
        def Iallgather(self, *_):
            raise MPI.Exception(MPI.ERR_TRUNCATE)

    transport = MPITransport()
    communicator, transport._comm = transport._comm, Failing()
    message, out = np.zeros(4, np.uint8), np.zeros((SIZE, 4), np.uint8)
    refuses("allgather of 4 bytes: MPI_ERR_TRUNCATE", transport.allgather, message, out)
    transport._comm = communicator
    transport.close()


@case
def after_mpi_is_finalized_everything_is_an_error_and_close_does_nothing():
    transport = MPITransport()
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    refuses("finalized", transport.allreduce, np.zeros(3, np.float32))
    refuses("finalized", MPITransport)
    transport.close()
