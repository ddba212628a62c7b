"""Bandwidth of drives under the load of the engine, and injected faults."""
