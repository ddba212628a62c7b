"""Directories of pretrained models, local or downloaded from the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import ConfigError, MachineError, first_lines
from infinity.integrations.huggingface.packages import package

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
_MODEL_FILES = [
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "model.safetensors.index.json",
    "model*.safetensors",
]


def find_directory(
    source: str | os.PathLike[str],
    revision: str | None = None,
    wanted: Sequence[str] = _MODEL_FILES,
) -> Path:
    """Return the directory with the model's files; a Hub id is downloaded or read from the cache.

    For a Hub id only files that match the patterns `wanted` are guaranteed to exist.

    Raises `ConfigError` if `source` is neither a directory nor a Hub id, `MachineError` if the
    download fails.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"{source!r} names no model", remedy="give a directory, or the id of a model on the Hub"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not (path / CONFIG_NAME).exists():
            raise ConfigError(
                f"{path} holds an adapter, not a model",
                remedy="load its base: from_pretrained(base, prepare=lambda model: "
                f"peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True))",
            )
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file", remedy="give the directory with its config.json")
    name = os.fspath(source)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no directory {name}")
    hub = package("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise MachineError(
            f"{name!r} is no local directory, and the Hugging Face Hub did not provide it",
            because=first_lines(error),
            remedy=f"on a machine with a network: hf download {name} --local-dir DIR; then give "
            "that directory",
        ) from error
