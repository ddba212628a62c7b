"""`save_pretrained`: export of an engine's model to a directory that transformers loads."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.common.sizes import parse_size
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.huggingface.packages import transformers
from infinity.model.lazy_tensor import LazyTensor
from infinity.model.weight_directory import saving
from infinity.model.weight_files import TensorToWrite, write_shards
from infinity.training.state_dict import read_on_first_rank, write_on_first_rank


def save_pretrained(
    engine: Engine,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard: int | str = "5GiB",
    original_format: bool = True,
) -> list[Path]:
    """Write a model that transformers' `from_pretrained` loads: configs, safetensors and tokenizer.

    At most one tensor is in RAM, two if tensors are split. Tied weights are written once. The files
    appear atomically when all are complete. If the model has peft adapters, only these are written,
    in the format of peft.

    Args:
        engine: Engine of a transformers or peft model.
        directory: Directory to write to; created if missing.
        tokenizer: Object with a `save_pretrained` method, or None.
        dtype: As in `Engine.save_weights`.
        max_shard: Largest size of a weight file, in bytes or as a string such as ``"5GiB"``. A
            larger tensor gets its own file.
        original_format: Write the names and shapes of published files: for example, separate
            experts if the model fuses them.

    Returns:
        Paths of the weight files.

    Raises:
        ConfigError: The model is not a transformers or peft model.
        DoesNotFitError: The disk is full.
        MachineError: The directory cannot be written. After any error training may continue, and
            existing files are unchanged.
    """
    module: Any = engine.module
    target = Path(directory).expanduser()
    state = Engine.state_dict(engine)
    ranks = engine.ranks
    if hasattr(module, "peft_config"):
        read_on_first_rank(
            ranks, state, lambda values: save_adapters(module, target, values, tokenizer)
        )
        return sorted(target.glob("*.safetensors"))
    if not isinstance(module, transformers().PreTrainedModel):
        raise ConfigError(
            f"save_pretrained takes models of transformers and peft, not {type(module).__name__}",
            remedy="engine.save_weights(directory)",
        )
    if getattr(module, "hf_quantizer", None) is not None:
        raise ConfigError(
            "a quantized model cannot be saved by save_pretrained",
            remedy="engine.save_weights(directory), or save its adapters",
        )
    outgoing = tensors_to_save(
        module, state.outgoing(dtype, partial(tied_weight_name, module)), original_format
    )
    write = partial(write_model, module, outgoing, target, tokenizer, parse_size(max_shard))
    try:
        return write_on_first_rank(ranks, outgoing, write)
    finally:
        state.flush()  # no value was edited: only frees the cache


def save_adapters(
    module: Any, target: Path, values: Mapping[str, Tensor], tokenizer: Any = None
) -> None:
    """Write the adapters of a peft model as its own `save_pretrained` does.

    Args:
        module: The peft model; its parameters are not read.
        target: Directory to write to; files appear when all are complete.
        values: Tensors by the names of `module.state_dict()`; only those of adapters are read.
        tokenizer: Object with a `save_pretrained` method, or None.
    """
    with saving(target) as folder:
        with suppress(FileNotFoundError):  # peft edits an existing model card
            shutil.copyfile(target / "README.md", folder / "README.md")
        module.save_pretrained(os.fspath(folder), state_dict=values)
        if tokenizer is not None:
            tokenizer.save_pretrained(os.fspath(folder))


def write_model(
    module: Any,
    tensors: Sequence[TensorToWrite],
    target: Path,
    tokenizer: Any,
    max_shard_bytes: int,
) -> list[Path]:
    """Write a transformers model as its own `save_pretrained` does, and return the weight files.

    Args:
        module: The model, of which only the configurations are used.
        tensors: Tensors from `tensors_to_save`.
        target: Directory to write to; files appear when all are complete.
        tokenizer: Object with a `save_pretrained` method, or None.
        max_shard_bytes: Largest size of a weight file; a larger tensor gets its own file.
    """

    def save_others(folder: Path) -> None:
        config = copy.deepcopy(module.config)
        config.dtype = next((t.dtype for t in tensors), torch.float32)
        config.architectures = [type(module).__name__]
        config.save_pretrained(os.fspath(folder))
        if module.can_generate():
            module.generation_config.save_pretrained(os.fspath(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(os.fspath(folder))

    return write_shards(target, tensors, max_shard_bytes, write_extra=save_others)


def tied_weight_name(module: Any, names: tuple[str, ...]) -> str:
    """Return the name under which transformers saves a tied tensor, out of its `names`."""
    tied = set(module.all_tied_weights_keys)
    return next((name for name in names if name not in tied), names[0])


def tensors_to_save(
    module: Any, tensors: Iterable[TensorToWrite], original_format: bool = True
) -> list[TensorToWrite]:
    """Return the tensors of a model under the names and shapes that transformers saves.

    Args:
        module: The model, of which only the naming rules are used.
        tensors: Its tensors; tied ones once, under the name from `tied_weight_name`.
        original_format: Revert the renames, fusions and splits that transformers does on loading.
    """
    ignored = set(module._keys_to_ignore_on_save or ())
    last_name, last_value = "", torch.empty(0)
    lazy_tensors: dict[str, Tensor] = {}

    def read_cached(name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return the last tensor again: its slices are written one after the other."""
        nonlocal last_name, last_value
        if name != last_name:
            last_name, last_value = "", torch.empty(0)  # free the previous one first
            last_value = read()
            last_name = name
        return last_value

    for tensor in tensors:
        if tensor.name not in ignored:
            read = partial(read_cached, tensor.name, tensor.read)
            lazy_tensors[tensor.name] = LazyTensor(tensor.shape, tensor.dtype, read)
    if original_format:
        conversions = importlib.import_module("transformers.core_model_loading")
        lazy_tensors = conversions.revert_weight_conversion(module, lazy_tensors)
    outgoing = []
    for name, value in lazy_tensors.items():
        assert isinstance(value, LazyTensor)
        outgoing.append(TensorToWrite(name, tuple(value.shape), value.dtype, value.read))
    return outgoing
