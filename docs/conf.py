"""Sphinx configuration: `make docs` builds the pages and the API reference."""

import infinity

project = "torch-infinity"
author = "The torch-infinity maintainers"
release = version = infinity.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torch-infinity"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Links to files of the repository outside docs; tests/test_style.py follows all links.
suppress_warnings = ["myst.xref_missing"]
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
