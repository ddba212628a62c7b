"""Swap benchmark: how fast training state streams to and from drives, and how close we come."""
