"""What the adapters of both frameworks share: no framework, and no Horovod."""
