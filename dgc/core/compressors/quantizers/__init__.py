"""Compressors that send every entry of a tensor in few bits."""
