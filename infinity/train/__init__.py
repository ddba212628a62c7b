"""The parts of `infinity train`: settings, corpus, loop, metrics, run directory.

Prints nothing, and imports torch and transformers only where they are used: `infinity.cli.train`
shows what happens here.
"""
