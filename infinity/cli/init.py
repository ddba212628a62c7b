"""`infinity init`: commented configurations to start from; the texts are in `presets/`."""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.terminal import command, say
from infinity.common.files import atomic_write, open_new
from infinity.errors import ConfigError, MachineError, did_you_mean

PRESETS = {
    "tiny-cpu": "0.8M parameters from scratch, any computer, under a minute",
    "pretrain-124m": "GPT-2 of 124M from scratch on your text",
    "chat": "fine-tune a model on conversations, all of it or adapters",
    "7b-24gb": "fine-tune 7B: GPU 24 GiB, RAM 64 GiB, disk 500 GB",
    "8b-24gb": "fine-tune 8B: GPU 24 GiB, RAM 64 GiB, disk 500 GB",
    "13b-24gb": "fine-tune 13B: GPU 24 GiB, RAM 64 GiB, disk 1 TB",
    "70b-24gb": "fine-tune 70B: GPU 24 GiB, RAM 64 GiB, disk 4 TB",
    "8b-qlora": "adapters over 8B in 4 bits: GPU 16 GiB, RAM 32 GiB, disk 100 GB",
    "70b-qlora": "adapters over 70B in 4 bits: GPU 24 GiB, RAM 64 GiB, disk 500 GB",
}
_LIST = "; ".join(f"{name}: {summary}" for name, summary in PRESETS.items())


def init(
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help=f"{_LIST}.")] = "tiny-cpu",
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where to write it; - is stdout.")
    ] = Path("train.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a configuration for `infinity train`, with comments about the values to change.

    Exits with 2 for an unknown preset, or if the file exists.
    """
    with command():
        if preset not in PRESETS:
            hint = did_you_mean(preset, PRESETS, cutoff=0.4)
            raise ConfigError(
                f"there is no preset {preset!r}; {hint}".rstrip("; "),
                remedy=f"--preset {', '.join(PRESETS)}",
            )
        if str(out) == "-":
            print(preset_text(preset, "train.yaml"), end="", flush=True)
            return
        out = out.expanduser()
        _write(out, preset_text(preset, str(out)), force)
        say(f"wrote {out} ({PRESETS[preset]}); read it, then: infinity train {out}")


def preset_text(name: str, file: str) -> str:
    """Return the text of a preset, with the file name inserted in its comments."""
    text = (Path(__file__).parent / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return text.replace("{library}", sysconfig.get_paths()["stdlib"]).replace("{file}", file)


def _write(path: Path, text: str, force: bool) -> None:
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: the name must end in .yaml", remedy="--out train.yaml")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path.parent} does not exist", remedy=shlex.join(["mkdir", "-p", str(path.parent)])
        )
    try:
        with atomic_write(path) if force else open_new(path) as file:
            file.write(text.encode())
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already", remedy="--out another name, or --force replaces it"
        ) from None
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}") from error
