"""What this adapter takes from Horovod: its collectives and transport."""
