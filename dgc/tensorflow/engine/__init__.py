"""From TensorFlow's tensors, optimizers and graphs to the exchange."""
