"""Storage tiers: devices, host memory, drives, and the files of a run."""
