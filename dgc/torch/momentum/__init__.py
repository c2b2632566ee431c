"""``DGCMomentum``: Paddle's optimizer for torch."""
