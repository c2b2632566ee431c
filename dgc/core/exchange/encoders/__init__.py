"""One bucket in one step, by compressor and by where the arrays are."""
