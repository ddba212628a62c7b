"""Command line, the only package that prints. Starts without torch."""
