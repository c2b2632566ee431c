"""Backends of the operations of size n: ``reference`` (NumPy oracle), ``cpu`` (Numba), ``gpu`` (CuPy)."""
