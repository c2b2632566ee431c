"""What ``DGCMomentum`` is in every framework: Paddle's arguments, its regularizers, its state."""
