"""Timelines of training: recorded by an engine, read back, measured, judged and drawn."""
