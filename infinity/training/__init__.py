"""The training step: hooks, gradients out, clipping, the optimizer pass, and whole values."""
