"""How an MPI rank waits, gives up and leaves the job."""
