"""Checkpoints on disk: what their files are, how they are written and how they are read.

Knows nothing of engines, tiers or training: bytes by name, a manifest, and what makes a directory
appear complete or not at all. The format is described in docs/checkpoint-format.md.
"""
