"""The user's module: cut into units, and made present or absent."""
