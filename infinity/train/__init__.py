"""Implementation of `infinity train`: settings, corpus, loop, metrics, run directory.

Prints nothing: `infinity.cli.train` displays progress and results.
"""
