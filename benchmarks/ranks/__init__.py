"""Time of training steps on several ranks."""
