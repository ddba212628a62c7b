"""Lazy imports of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from infinity.errors import ConfigError


def transformers() -> Any:
    """Import and return transformers; see `package`."""
    return package("transformers")


def package(name: str) -> Any:
    """Import and return a package; raise `ConfigError` with a remedy if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the package {name} cannot be imported: {error}",
            remedy="pip install 'torch-infinity[hf]'",
        ) from error
