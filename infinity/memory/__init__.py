"""The tier manager: what exists on each tier, and the movement between them."""
