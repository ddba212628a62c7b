"""Version of the installed distribution."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    """Return the version of torch-infinity; another distribution may provide `infinity` instead."""
    try:
        return metadata.version("torch-infinity")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"the package imported as 'infinity' from {__file__} is not installed as "
            "'torch-infinity'; run `make setup`, or `pip install -e .` in a virtual environment "
            "of its own (the distributions 'infinity' and 'infinity-sdk' use the same import name)"
        ) from None


__version__ = _installed()
