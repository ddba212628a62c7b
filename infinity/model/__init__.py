"""The user's module: cut into units, and made resident or offloaded."""
