"""Ranks: collectives, shared memory, and errors that are raised on all ranks."""
