"""``DGCMomentum``: Paddle's optimizer for either Keras."""
