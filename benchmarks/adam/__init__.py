"""Throughput of the optimizer kernels."""
