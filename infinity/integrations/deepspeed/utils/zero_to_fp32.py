"""Conversion of infinity and DeepSpeed checkpoints to fp32 weights, by DeepSpeed's names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from infinity.checkpoint.directory import find_tag
from infinity.checkpoint.reader import CheckpointReader
from infinity.common.files import atomic_write, make_directories
from infinity.common.sizes import parse_size
from infinity.errors import CheckpointError
from infinity.integrations.deepspeed.import_checkpoint import deepspeed_weights, is_zero
from infinity.integrations.deepspeed.names import getter
from infinity.model.weight_files import TensorToWrite, write_shards

StrPath = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: StrPath,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return fp32 values by name, on the CPU, with all names of tied weights, and buffers.

    Trained parameters are the exact fp32 masters; buffers and values that are not floats keep
    their dtype. All values are in RAM at once; `lazy_mode` has no effect.
    `convert_zero_checkpoint_to_fp32_state_dict` reads one value at a time. Raises `CheckpointError`
    or `ConfigError` if the checkpoint cannot be read.
    """
    with _tensors(checkpoint_dir, tag, exclude_frozen_parameters) as (tensors, aliases):
        state = {tensor.name: tensor.read().to(tensor.dtype) for tensor in tensors}
        return state | {alias: state[name] for alias, name in aliases.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: StrPath,
    output_dir: StrPath,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Write the fp32 weights as safetensors, one tensor in RAM at a time; return the files.

    Without `safe_serialization`, writes one `pytorch_model.bin` for `torch.load`, with all values
    in RAM at once.
    """
    out = Path(output_dir).expanduser()
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        )
        make_directories(out)
        with atomic_write(out / "pytorch_model.bin") as file:
            torch.save(state, file)
        return [out / "pytorch_model.bin"]
    with _tensors(checkpoint_dir, tag, exclude_frozen_parameters) as (tensors, _):
        return write_shards(out, tensors, parse_size(max_shard_size))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: StrPath, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights into a model, with or without an engine, and return it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state, strict=False)
    return model


@contextmanager
def _tensors(
    checkpoint_dir: StrPath, tag: str | None, exclude_frozen: bool
) -> Iterator[tuple[list[TensorToWrite], Mapping[str, str]]]:
    """Yield the tensors to write, tied ones once, and their aliases (alias -> name)."""
    root = Path(checkpoint_dir).expanduser()
    if is_zero(root, tag):
        yield deepspeed_weights(root, tag, frozen=not exclude_frozen)
        return
    found_tag = find_tag(root, tag)
    if found_tag is None:
        raise CheckpointError(f"{root} has no latest checkpoint", remedy="pass tag=...")
    with CheckpointReader(root, found_tag) as reader:
        parameters = reader.manifest.parameters
        excluded = {p.name for p in parameters if exclude_frozen and not p.trained}
        all_tensors = reader.outgoing(torch.float32)
        tensors = [tensor for tensor in all_tensors if tensor.name not in excluded]
        included = [p for p in parameters if p.name not in excluded]
        yield tensors, {alias: p.name for p in included for alias in p.aliases}


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m infinity.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`."""
    parser = argparse.ArgumentParser(description="write the fp32 weights of a checkpoint")
    parser.add_argument("checkpoint_dir", help="directory of infinity's or DeepSpeed's checkpoints")
    parser.add_argument("output_dir", help="directory of the safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="maximum size of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="always on")
    parser.add_argument("-t", "--tag", help="default: the latest checkpoint")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        options.max_shard_size,
        tag=options.tag,
        exclude_frozen_parameters=options.exclude_frozen_parameters,
    )


__getattr__ = getter("utils.zero_to_fp32")

if __name__ == "__main__":
    main()
