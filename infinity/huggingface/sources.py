"""Where a pretrained model comes from: a directory, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from infinity.errors import ConfigError, MachineError, first_lines
from infinity.huggingface.library import hub

_WANTED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]


def find_directory(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The directory with the model's files; a Hub id is downloaded, or found in the Hub's cache.

    Raises `ConfigError` for what is neither, `MachineError` where the Hub cannot be asked.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"{source!r} names no model", remedy="give a directory, or the id of a model on the Hub"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        _refuse_adapter(path)
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file", remedy="give the directory with its config.json")
    name = os.fspath(source)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no directory {name}")
    library = hub()
    try:
        return Path(library.snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except (OSError, ValueError, library.errors.HfHubHTTPError) as error:
        raise MachineError(
            f"{name!r} is no directory here, and the Hugging Face Hub did not give it",
            because=first_lines(error),
            remedy=f"where there is a network: hf download {name} --local-dir DIR; then "
            "from_pretrained('DIR')",
        ) from error


def _refuse_adapter(path: Path) -> None:
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ConfigError(
            f"{path} holds an adapter, not a model",
            remedy="load its base: from_pretrained(base, prepare=lambda model: "
            f"peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True))",
        )
