"""Encoders of tensors that are on a device."""
