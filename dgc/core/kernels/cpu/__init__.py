"""The backend for processors, in Numba."""
