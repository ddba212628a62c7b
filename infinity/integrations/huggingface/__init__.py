"""Integration with transformers: loading, planning, training and saving of its models.

transformers is imported on first use; `import infinity` does not need it.
"""
