"""The transformers package, asked for when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from infinity.errors import ConfigError


def transformers() -> Any:
    """The module; raises `ConfigError` saying what to install where it is missing."""
    return _package("transformers")


def hub() -> Any:
    """The module `huggingface_hub`, which transformers brings along."""
    return _package("huggingface_hub")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the package {name} cannot be imported: {error}",
            remedy="pip install transformers",
        ) from error
