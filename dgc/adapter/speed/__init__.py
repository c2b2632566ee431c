"""Whether a bucket is faster compressed or dense: measured once at construction, agreed, then fixed for the run."""
