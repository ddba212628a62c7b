"""Version of the installed distribution."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("torch-infinity")
except metadata.PackageNotFoundError:
    raise ImportError(
        f"the package imported as 'infinity' from {__file__} is not installed as "
        "'torch-infinity'; run `make setup`, or `pip install -e .` in a virtual environment "
        "of its own (the distributions 'infinity' and 'infinity-sdk' use the same import name)"
    ) from None
