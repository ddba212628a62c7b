"""Ranks: collectives, shared memory, and errors that all ranks raise."""
