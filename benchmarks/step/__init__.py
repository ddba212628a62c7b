"""Time of training steps: contenders in processes of their own, bounds, report."""
