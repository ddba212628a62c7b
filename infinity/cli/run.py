"""`infinity run`: run a script in which `import deepspeed` finds infinity."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.terminal import command, progress_bar_environment, say
from infinity.errors import ConfigError

# Arguments after the script belong to the script.
SETTINGS = {"allow_interspersed_args": False}


def run(
    target: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="A Python file, or a command such as accelerate."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARG]...", help="Arguments of the script.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="How many processes, one a GPU.", min=1)] = 1,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
    local_rank: Annotated[
        bool,
        typer.Option("--local-rank", help="Append --local_rank=N, as DeepSpeed's launcher does."),
    ] = False,
) -> None:
    """Run an unchanged script that was written for DeepSpeed, or Trainer or accelerate over it.

    In its processes `import deepspeed` finds infinity. For example: infinity run --gpus 2 train.py
    --deepspeed ds_config.json; infinity run accelerate launch --use_deepspeed train.py
    """
    with command():
        from infinity.integrations.deepspeed.door import WORDS, child_environment

        script = _python_arguments(target, module)
        if gpus > 1 and script is None:
            raise ConfigError(
                f"--gpus {gpus} with {target}, which starts processes itself",
                remedy=f"infinity run {target} ..., with its own options",
            )
        if local_rank:  # torch's launcher substitutes the rank
            rank = "${local_rank}" if gpus > 1 else "0"
            arguments = [*(arguments or ()), f"--local_rank={rank}"]
        environment = child_environment(alone=gpus == 1 and script is not None)
        environment |= progress_bar_environment()
        say(f"infinity run: {WORDS}")
        if gpus > 1:
            from infinity.cli.launch import launch

            os.environ.update(environment)
            launch(gpus, [*(script or ()), *(arguments or ())])
            return
        argv = [_command_path(target)] if script is None else [sys.executable, *script]
        sys.stdout.flush()
        os.execvpe(argv[0], [*argv, *(arguments or ())], environment)


def _python_arguments(target: str, module: bool) -> list[str] | None:
    """Return the arguments of Python for a script or module; None for another command."""
    if module:
        return ["-m", target]
    if target.endswith(".py") or Path(target).is_file():
        if not Path(target).is_file():
            raise ConfigError(f"there is no file {target}")
        return [target]
    _command_path(target)
    return None


def _command_path(name: str) -> str:
    """Return the path of a command, preferably from the directory of this Python."""
    directory = Path(sys.executable).parent
    path = shutil.which(name, path=directory) or shutil.which(name)
    if path is None:
        raise ConfigError(
            f"{name} is neither a file nor a command",
            remedy="infinity run --gpus N train.py ..., which starts the processes itself"
            if name == "deepspeed"
            else "the path of a script",
        )
    return path
