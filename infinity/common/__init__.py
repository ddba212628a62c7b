"""Helpers independent of the engine: files, sizes, checksums, the C heap."""
