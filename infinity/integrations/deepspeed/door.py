"""Alias of this library as `import deepspeed`, for this process or for a child process.

The directory `stand_in/` becomes the first entry of the import path. It has a package `deepspeed`
and metadata of a distribution of that name (in egg format, as a wheel cannot contain the .dist-info
of another distribution). No installed file changes: another process still imports an installed
DeepSpeed.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from collections.abc import MutableMapping
from pathlib import Path

from infinity._version import __version__
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.names import VERSION

STAND_IN_DIRECTORY = str(Path(__file__).with_name("stand_in"))
WORDS = f"`import deepspeed` finds infinity {__version__}, with the names of DeepSpeed {VERSION}"
# Variables that a launcher sets for a single process; Trainer and accelerate read them.
_SINGLE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def as_deepspeed() -> None:
    """Make `import deepspeed` import this library, in this process.

    Call it in the first line of a script. transformers and accelerate then detect DeepSpeed as
    installed. If no launcher started the process, the environment variables of a launcher are set
    for one process.

    Raises:
        ConfigError: Another deepspeed, or transformers' integration of it, is already imported.
    """
    imported = sys.modules.get("deepspeed")
    if imported is not None and imported is not sys.modules["infinity.integrations.deepspeed"]:
        raise ConfigError(
            f"deepspeed is imported already, from {getattr(imported, '__file__', None)}",
            remedy="make infinity.as_deepspeed() the first line, or start with `infinity run`",
        )
    if imported is None and "transformers.integrations.deepspeed" in sys.modules:
        raise ConfigError(
            "infinity.as_deepspeed() is called after transformers has looked for DeepSpeed",
            remedy="make it the first line, or start with `infinity run`",
        )
    if STAND_IN_DIRECTORY not in sys.path:
        sys.path.insert(0, STAND_IN_DIRECTORY)
        importlib.invalidate_caches()
        set_single_process_environment(os.environ)
        logging.getLogger("infinity").info(WORDS)


def set_single_process_environment(environment: MutableMapping[str, str]) -> None:
    """Set the environment variables of a launcher for one process, unless a launcher has set them.

    MASTER_PORT is a free port: another process may use the default one.
    """
    if not any(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        with socket.create_server((_SINGLE_PROCESS["MASTER_ADDR"], 0)) as server:
            port = server.getsockname()[1]
        environment.update({**_SINGLE_PROCESS, "MASTER_PORT": str(port), **environment})


def child_environment(*, alone: bool) -> dict[str, str]:
    """Return an environment in which a child process imports this library as `deepspeed`."""
    paths = [STAND_IN_DIRECTORY, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if alone:
        set_single_process_environment(environment)
    return environment
