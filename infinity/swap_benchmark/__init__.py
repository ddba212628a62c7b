"""Swap benchmark: rates of infinity's I/O engine and of plain threads on the same drives."""
