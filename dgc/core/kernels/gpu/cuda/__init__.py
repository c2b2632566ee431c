"""The kernels in CUDA C++, and what joins them into one source."""
