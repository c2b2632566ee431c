"""Code that the adapters of both frameworks share. It imports neither a framework nor Horovod."""
