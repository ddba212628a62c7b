"""What a run of `infinity train` is made of: settings, corpus, loop, metrics, its directory.

Prints nothing, and imports torch and transformers only where they are used: `infinity.cli.train`
shows what happens here.
"""
