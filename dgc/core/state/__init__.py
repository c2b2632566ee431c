"""What a compressor keeps from step to step, and where in it each parameter lies."""
