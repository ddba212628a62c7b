"""Bandwidth of drives as the engine uses them, and injected faults."""
