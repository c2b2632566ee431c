"""Compressors that send some entries of a tensor."""
