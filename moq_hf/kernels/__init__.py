"""Who computes: Triton, numba and the CPU path, and the one place that picks."""
