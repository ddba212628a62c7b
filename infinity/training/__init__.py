"""The training step: hooks, gradients out, clipping, the sweep, and whole values."""
