"""Build a wheel of Horovod 0.28.1 that works with current PyTorch and TensorFlow."""
