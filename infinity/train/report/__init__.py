"""HTML pages of runs and traces, each a self-contained file."""
