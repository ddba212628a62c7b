"""What lives where, in which order, at what cost: pure data, computed without hardware."""
