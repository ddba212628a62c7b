"""Models: initial values, partitioning into units, and residency of parameters."""
