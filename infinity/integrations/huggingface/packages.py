"""Optional packages, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from infinity.errors import ConfigError


def transformers() -> Any:
    """The module; raises as `package`."""
    return package("transformers")


def package(name: str) -> Any:
    """The module; raises `ConfigError` saying what to install where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the package {name} cannot be imported: {error}",
            remedy="pip install 'torch-infinity[hf]'",
        ) from error
