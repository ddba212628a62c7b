"""Configuration: schema, sources, earlier names of keys, and error messages."""
