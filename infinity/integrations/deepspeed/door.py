"""`import deepspeed` finds us: in this process, or in one that is about to start.

A folder that stands first on the path of imports does it: in `stand_in/` lie a package and the
metadata of a distribution by that name (as an egg's: wheels are built without any .dist-info but
their own). Nothing on disk changes, and a DeepSpeed that is installed is found again by the next
process.
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

STAND_IN = str(Path(__file__).with_name("stand_in"))
WORDS = f"`import deepspeed` finds infinity {__version__}, with the names of DeepSpeed {VERSION}"
# What a launcher says to the only process that it starts; Trainer and accelerate go by it.
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def as_deepspeed() -> None:
    """Make `import deepspeed` import this library, in this process.

    Call it in the first line of a script. transformers and accelerate then find DeepSpeed
    installed, too. If no launcher started the process, the variables of a launcher are set for one
    process.

    Raises:
        ConfigError: Another deepspeed is imported already, or transformers has looked for it.
    """
    found = sys.modules.get("deepspeed")
    if found is not None and found is not sys.modules["infinity.integrations.deepspeed"]:
        raise ConfigError(
            f"deepspeed is imported already, from {getattr(found, '__file__', None)}",
            remedy="make infinity.as_deepspeed() the first line, or start with `infinity run`",
        )
    if found is None and "transformers.integrations.deepspeed" in sys.modules:
        raise ConfigError(
            "infinity.as_deepspeed() comes after transformers, which has looked for DeepSpeed",
            remedy="make it the first line, or start with `infinity run`",
        )
    if STAND_IN not in sys.path:
        sys.path.insert(0, STAND_IN)
        importlib.invalidate_caches()
        announce_alone(os.environ)
        logging.getLogger("infinity").info(WORDS)


def announce_alone(environment: MutableMapping[str, str]) -> None:
    """Set a launcher's variables for one process, unless there is a launcher.

    MASTER_PORT is a free port: another script of this machine may hold the usual one.
    """
    if not any(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        with socket.create_server((_ALONE["MASTER_ADDR"], 0)) as server:
            port = server.getsockname()[1]
        environment.update({**_ALONE, "MASTER_PORT": str(port), **environment})


def environment_of_children(*, alone: bool) -> dict[str, str]:
    """The environment of a process that finds us as deepspeed, and whose children do too."""
    paths = [STAND_IN, *filter(None, [os.environ.get("PYTHONPATH")])]
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if alone:
        announce_alone(made)
    return made
