"""Training: the step, the optimizer pass, checkpoints, and access to full parameter values."""
