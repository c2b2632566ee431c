"""Horovod's collectives and transport for TensorFlow."""
