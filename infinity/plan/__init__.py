"""Placement, access order and cost of a run: pure data, computed without hardware."""
