"""Checks of `tools/gpu_check.sh` on a machine with a GPU: stages, targets, report."""
