"""Settings of `initialize`, read from a configuration of infinity or DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinity.config.schema import load_config
from infinity.config.settings import Settings
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.config import Translation, find_translation


@dataclass(frozen=True, slots=True)
class DeepSpeedSettings(Settings):
    """Settings, with the DeepSpeed configuration that they were translated from.

    Attributes:
        translation: The translation; None if `given` is an infinity configuration.
        given: The configuration as it was passed.
    """

    translation: Translation | None = None
    given: Any = None

    def step_log_header(self) -> dict[str, Any]:
        """Return the treatment of each DeepSpeed key, for the step log."""
        return {} if self.translation is None else {"deepspeed": self.translation.table()}


def read_settings(
    config: Any,
    config_params: Any = None,
    args: Any = None,
    batch_size: int | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    model_parameters: Any = None,
    ranks: int = 1,
) -> Settings:
    """Read the configuration from the arguments of `initialize`.

    `config` and `config_params` are a `Config`, a dict, a path, or text; `args` is the result of an
    `argparse` parser, and `args.deepspeed_config` a path. `batch_size`, `optimizer` and
    `lr_scheduler` take precedence over the configuration. Without `optimizer` and
    `model_parameters`, a DeepSpeed configuration may lack an optimizer: then `trains` is False.
    Batch sizes are checked for `ranks` processes. `Settings` are returned unchanged. Raises
    `ConfigError` if there is no configuration, several that differ, or an invalid one.
    """
    if isinstance(config, Settings):
        return config
    arguments = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    if not given:
        raise ConfigError(
            "initialize() got no configuration",
            remedy='after the model: initialize(model, config={"optimizer": {"lr": 1e-4}}), or the '
            "path of a file",
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
        may_infer=(model_parameters is None or model_parameters == []) and optimizer is None,
        ranks=ranks,
    )
    if translation is None:
        size = 1 if batch_size is None else batch_size
        return DeepSpeedSettings(load_config(first), size, given=first)
    return DeepSpeedSettings(
        translation.config,
        translation.batch_size if batch_size is None else batch_size,
        translation.drop_last,
        trains=translation.trains,
        translation=translation,
        given=first,
    )
