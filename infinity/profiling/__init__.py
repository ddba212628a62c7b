"""Measurements: rates of this machine, step reports, traces, memory."""
