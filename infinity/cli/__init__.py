"""The command line, and the only room that prints. Starts without torch."""
