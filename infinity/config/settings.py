"""Settings of an engine: its configuration, and that of the loader of `initialize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinity.config.schema import Config


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of an engine and of the loader that `initialize` makes.

    Attributes:
        config: The configuration.
        batch_size: Samples of a micro-batch of the loader.
        drop_last: Whether the loader drops a last micro-batch that is smaller.
        shuffles: Whether the loader shuffles, and accepts any sequence, not only a Dataset.
        trains: False for an inference engine, even if parameters require grad.
    """

    config: Config
    batch_size: int = 1
    drop_last: bool = False
    shuffles: bool = False
    trains: bool = True

    def step_log_header(self) -> dict[str, Any]:
        """Return JSON-serializable entries for the first record of the step log.

        Empty unless `config` was translated from another format. A translated configuration leaves
        no default to infinity: those of its format apply.
        """
        return {}
