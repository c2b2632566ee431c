"""stub"""


def make_transport(choice, process_set=None):
    from dgc.transport.mpi import MPITransport

    return MPITransport()
