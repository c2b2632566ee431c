"""From torch's tensors and optimizers, and Horovod's, to the exchange."""
