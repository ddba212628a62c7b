"""A DeepSpeed configuration, key by key: the table, its translation, and where it is read from."""
