"""Moving bytes between ranks: ``local`` (threads of one process) and ``mpi`` (mpi4py)."""
