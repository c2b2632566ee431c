"""Where the applications' data come from, and the cache that they are built into once."""
