"""Optimizers: update rules, kernels, adapted torch optimizers and learning-rate schedules."""
