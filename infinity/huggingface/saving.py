"""`save_pretrained`: an engine's model as a directory that transformers loads."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.huggingface.library import transformers
from infinity.model.promised import Promised
from infinity.model.weight_directory import saving
from infinity.model.weight_files import Outgoing, write_shards
from infinity.sizes import parse_size
from infinity.training.state_dict import StateDict


def save_pretrained(
    engine: Engine,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard: int | str = "5GiB",
    original_format: bool = True,
) -> list[Path]:
    """Write config.json, generation_config.json and safetensors; returns the weight files.

    Tensor by tensor out of any homes, tied weights once, in the names and shapes that transformers
    itself saves (`original_format`: experts one by one, say, where the model holds them fused).
    RAM holds the largest tensor, twice where tensors are split. `dtype` as in
    `engine.save_weights`. `tokenizer` is anything with a `save_pretrained`. Of a model with
    adapters (peft) the adapters are saved, as by its own `save_pretrained`, which keeps a whole
    copy of the base in RAM meanwhile; this does not.

    All files appear when all are complete, as with `save_weights`, those beside the weights just
    before these. Raises `ConfigError` for other models, `DoesNotFitError` or `MachineError` as
    `save_weights`; training may go on after any, and weights saved there before stay.
    """
    module: Any = engine.module
    target = Path(directory).expanduser()
    state = engine.state_dict()

    def save_tokenizer(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(os.fspath(folder))

    if hasattr(module, "peft_config"):
        with saving(target) as folder:
            with suppress(FileNotFoundError):  # peft writes into the one that is there
                shutil.copyfile(target / "README.md", folder / "README.md")
            module.save_pretrained(os.fspath(folder), state_dict=state)
            save_tokenizer(folder)
        return sorted(target.glob("*.safetensors"))
    _check(module)
    outgoing = _outgoing(module, state, dtype, original_format)

    def save_others(folder: Path) -> None:
        _save_configs(module, folder, next((t.dtype for t in outgoing), torch.float32))
        save_tokenizer(folder)

    try:
        return write_shards(target, outgoing, parse_size(max_shard), beside=save_others)
    finally:
        state.flush()  # nothing was edited: only forgets what is cached


def _check(module: Any) -> None:
    if not isinstance(module, transformers().PreTrainedModel):
        raise ConfigError(
            f"save_pretrained takes models of transformers and peft, not {type(module).__name__}",
            remedy="engine.save_weights(directory)",
        )
    if getattr(module, "hf_quantizer", None) is not None:
        raise ConfigError(
            "a quantised model cannot be saved by save_pretrained",
            remedy="engine.save_weights(directory), or save its adapters",
        )


def _outgoing(
    module: Any, state: StateDict, dtype: torch.dtype | str | None, original_format: bool
) -> list[Outgoing]:
    tied = set(module.all_tied_weights_keys)
    ignored = set(module._keys_to_ignore_on_save or ())
    last = _LastRead()
    given: dict[str, Tensor] = {}

    def tied_name(names: tuple[str, ...]) -> str:
        return next((name for name in names if name not in tied), names[0])

    for tensor in state.outgoing(dtype, tied_name):
        if tensor.name not in ignored:
            read = partial(last.read, tensor.name, tensor.read)
            given[tensor.name] = Promised(tensor.shape, tensor.dtype, read)
    if original_format:
        conversions = importlib.import_module("transformers.core_model_loading")
        given = conversions.revert_weight_conversion(module, given)
    outgoing = []
    for name, value in given.items():
        assert isinstance(value, Promised)
        outgoing.append(Outgoing(name, tuple(value.shape), value.dtype, value.value))
    return outgoing


def _save_configs(module: Any, target: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(module.config)
    config.dtype = dtype
    config.architectures = [type(module).__name__]
    config.save_pretrained(os.fspath(target))
    if module.can_generate():
        module.generation_config.save_pretrained(os.fspath(target))


class _LastRead:
    """Keeps the tensor read last: of one that is split, the parts are written one by one."""

    def __init__(self) -> None:
        self._name = ""
        self._value = torch.empty(0)

    def read(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """The values; those of another name are let go of first."""
        if name != self._name:
            self._name, self._value = "", torch.empty(0)
            self._value = read()
            self._name = name
        return self._value
