"""`TrainingArguments` that keep `deepspeed=` for us, whether or not that package is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinity.huggingface.library import transformers

_Arguments: Any = transformers().TrainingArguments


@dataclass
class TrainingArguments(_Arguments):  # type: ignore[misc]
    """`transformers.TrainingArguments`, unchanged but for `deepspeed`.

    There `deepspeed="ds_config.json"` needs the package deepspeed, which then takes the process
    over; here it is the configuration that `InfinityTrainer` translates, as `infinity_config` is.
    """

    def __post_init__(self) -> None:
        given, self.deepspeed = self.deepspeed, None  # type: ignore[has-type]
        super().__post_init__()
        self.deepspeed = given
