"""Transports, which move bytes between ranks: ``local`` (threads of one process), ``mpi`` (mpi4py) and their bases."""
