"""Benchmarks as a library: they measure and return facts; `infinity/cli` shows them."""
