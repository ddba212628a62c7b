"""Helpers without knowledge of the engine: files, sizes, checksums, the C heap."""
