"""Command-line texts for the changes that a plan suggests.

`infinity plan` takes options, and keys of a configuration as KEY=VALUE; `infinity train` takes
keys only, and cannot change the machine. A change without a text for the command is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infinity.config.schema import checkpoint_setting
from infinity.plan.advice import Change
from infinity.train.settings import RunConfig

# Text to type for all changes of a suggestion.
CommandText = Callable[[Sequence[Change]], "str | None"]

# Keys of the engine's configuration by the name of a change; placement has one key per kind.
_KEYS = {
    "placement": "placement",
    "chunk_size": "chunk_size",
    "budget.device": "budget.device",
    "budget.host": "budget.host",
    "budget.disk": "budget.disk",
    "activations.tokens": "activations.tokens",
    "precision": "precision",
    "moments": "optimizer.moments",
    "rest": "frozen.format",
    "slices": "activations.slices",
    "recompute": "activations.checkpoint",
    "offload": "activations.offload",
}
# Options of `infinity plan` by the name of a change; other changes are typed as keys.
_OPTIONS: dict[str, Callable[[Any], str]] = {
    "finer_units": lambda _: "--finer-units",
    "precision": "--precision {}".format,
    "moments": "--moments {}".format,
    "rest": "--rest {}".format,
    "slices": "--slices {}".format,
    "offload": "--activations {}".format,
    "gpus": "--gpus {}".format,
    "recompute": lambda blocks: _RECOMPUTE.get(blocks) or f"--recompute-blocks {blocks}",
    "batch": lambda step: f"--tokens {step[0]} --micro-batches {step[1]}",
    "drives": lambda more: f"--drives {more[0]} --disk {exact_size(more[1])}",
    "device": lambda nbytes: f"--device {exact_size(nbytes)}",
    "host": lambda nbytes: f"--host {exact_size(nbytes)}",
    "disk": lambda nbytes: f"--disk {exact_size(nbytes)}",
    "adapter": lambda kind: f"--lora {kind[0]}" + (f" --rest {kind[1]}" if kind[1] else ""),
}
_RECOMPUTE: dict[Any, str] = {"all": "--recompute", 0: "--no-recompute", None: "--no-recompute"}
NAMES = frozenset({*_KEYS, *_OPTIONS})  # of all kinds of changes


def plan_command_text(*, of_run: bool) -> CommandText:
    """Return the texts for `infinity plan`.

    Args:
        of_run: Whether its target is a configuration of `infinity train`.
    """
    prefix = "engine." if of_run else ""

    def text_of(change: Change) -> str:
        if of_run and change.name == "adapter":
            return _adapter_key(change)
        option = _OPTIONS.get(change.name)
        return option(change.value) if option else _key_text(prefix, change)

    return lambda changes: " ".join(map(text_of, changes))


def train_command_text(run: RunConfig, length: int) -> CommandText:
    """Return the texts for `infinity train` of a run with windows of `length` tokens."""

    def text_of(change: Change) -> str | None:
        if change.name == "batch":
            tokens, _, micro_batch_tokens = change.value
            keys = f"training.micro_batch={micro_batch_tokens // length}"
            if run.training.tokens_per_step is not None:  # of all ranks
                return f"{keys} training.tokens_per_step={tokens}"
            return f"{keys} engine.gradient_accumulation_steps={tokens // micro_batch_tokens}"
        if change.name == "recompute" and run.model.gradient_checkpointing:
            return None if change.value else "model.gradient_checkpointing=false"
        if change.name == "adapter":
            return _adapter_key(change)
        return _key_text("engine.", change) if change.name in _KEYS else None

    def text_of_all(changes: Sequence[Change]) -> str | None:
        texts = [text for change in changes if (text := text_of(change)) is not None]
        return " ".join(texts) if len(texts) == len(changes) else None

    return text_of_all


def _key_text(prefix: str, change: Change) -> str:
    """Return a change as KEY=VALUE, with a prefix before each key."""
    key, value = prefix + _KEYS[change.name], change.value
    if change.name == "placement":
        return " ".join(f"{key}.{name}=auto" for name in value)
    if change.name == "recompute":
        value = checkpoint_setting(value or 0)
    elif change.name.startswith("budget."):
        value = "null" if value is None else exact_size(value)
    return f"{key}={value}"


def _adapter_key(change: Change) -> str:
    """Return the key of a run for adapters; the rank is the default of `AdapterSection`."""
    return f"adapter.type={'qlora' if change.value[1] else 'lora'}"


def exact_size(nbytes: int) -> str:
    """Return an exact size as an option takes it, as "64GiB" or "1536MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
