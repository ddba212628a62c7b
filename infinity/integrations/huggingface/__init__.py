"""Models of the transformers package: loaded to where their weights rest, generated with, saved.

transformers is imported where it is used, and not before: `import infinity` does not need it.
"""
