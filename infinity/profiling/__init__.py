"""Measurements: machine rates, step reports, traces, memory."""
