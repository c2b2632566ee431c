"""One step over all buckets: what is sent, received, applied and refused."""
