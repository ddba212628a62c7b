"""What `tools/gpu_check.sh` runs on a machine with a GPU: stages, targets, report."""
