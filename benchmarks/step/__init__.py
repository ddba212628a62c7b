"""Time of training steps: contenders in child processes, bounds, report."""
