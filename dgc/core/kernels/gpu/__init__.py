"""The backend for devices: CUDA kernels, and what launches them. Only ``cupy_runtime`` imports CuPy."""
