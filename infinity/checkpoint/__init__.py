"""Checkpoints on disk: file formats, writers and readers.

Independent of engines and training: tensors by name, a manifest, and the atomic publication of a
directory. The format is described in docs/checkpoint-format.md.
"""
