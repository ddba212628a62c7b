"""What `initialize` is told: a configuration of ours or DeepSpeed's, by any of three arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed_config import Translation, find_translation


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration of ours, and what a DeepSpeed configuration says beside it.

    `translation` is None where ours was given. `batch_size` is that of a loader, in samples.
    """

    config: Config
    translation: Translation | None
    batch_size: int
    drop_last: bool
    given: Any = None  # the configuration as it came

    @property
    def trains(self) -> bool:
        """False for a DeepSpeed configuration with nothing that would train."""
        return self.translation is None or self.translation.trains

    def journal_entry(self) -> dict[str, Any]:
        """What the journal says of it: a row for each key of DeepSpeed's."""
        return {} if self.translation is None else {"deepspeed": self.translation.table()}


def read_settings(
    config: Any,
    config_params: Any = None,
    args: Any = None,
    batch_size: int | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    model_parameters: Any = None,
) -> Settings:
    """Read `initialize`'s configuration, whichever argument it came by.

    `config` and `config_params` are a `Config`, a dict, a path, or a text; `args` is what a parser
    made, whose `deepspeed_config` is a path. `batch_size`, `optimizer` and `lr_scheduler`, where
    they are given, win over the configuration's. Without `optimizer` and `model_parameters` a
    DeepSpeed configuration need not say how to train: then `trains` is false. `Settings` that were
    read before are returned as they are. Raises `ConfigError` for no configuration, for several
    that differ, and for what is wrong in it.
    """
    if isinstance(config, Settings):
        return config
    ways = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if not given:
        raise ConfigError(
            "initialize() got no configuration",
            remedy='config={"optimizer": {"lr": 1e-4}}, or the path of a file',
        )
    first, *others = given.values()
    if any(other is not first and other != first for other in others):
        raise ConfigError(
            f"initialize() got several configurations: {', '.join(given)}",
            remedy="keep one of them",
        )
    translation = find_translation(
        first,
        client_optimizer=optimizer is not None,
        client_scheduler=lr_scheduler is not None,
        may_infer=model_parameters is None and optimizer is None,
    )
    if translation is None:
        size = 1 if batch_size is None else batch_size
        return Settings(load_config(first), None, size, False, first)
    size = translation.batch_size if batch_size is None else batch_size
    return Settings(translation.config, translation, size, translation.drop_last, first)


def read_seed(source: Any) -> int | None:
    """The seed in a configuration of ours, or in the section of ours in one of DeepSpeed's."""
    translation = find_translation(source, lenient=True)
    return (load_config(source) if translation is None else translation.config).seed


def add_config_arguments(parser: Any) -> Any:
    """Add `--deepspeed` and `--deepspeed_config PATH` to an `argparse` parser; returns it.

    Pass what it parses as `initialize(args=...)`. The flag is taken and changes nothing.
    """
    group = parser.add_argument_group("infinity", "options of the training engine")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="taken for scripts that were written for DeepSpeed; changes nothing",
    )
    group.add_argument(
        "--deepspeed_config",
        default=None,
        type=str,
        metavar="PATH",
        help="a configuration, DeepSpeed's or ours",
    )
    return parser


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Nothing to do for one process, which needs no process group; arguments are ignored.

    Raises `ConfigError` if a launcher started several.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: several processes are not supported yet",
            remedy="run one process, without a launcher (unset WORLD_SIZE)",
        )
