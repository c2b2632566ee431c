"""What this adapter takes from Horovod: its collectives, transport and ranks."""
