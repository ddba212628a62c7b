"""The files of a DeepSpeed ZeRO checkpoint, read without running what they may contain.

They are pickles. They are read by torch's restricted unpickler, which makes tensors, containers and
numbers; the few classes of DeepSpeed's own become empty shells here. Anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinity.errors import CheckpointError, ConfigError, first_lines

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_.*\.pt|layer_[0-9]+-.*\.pt")
_REMEDY = "export the weights there as safetensors (zero_to_fp32.py --safe_serialization)"


class _Fragment:
    """Stands for `deepspeed.utils.tensor_fragment.fragment_address`."""


class _Scaler:
    """Stands for DeepSpeed's loss scaler."""


class _DynamicScaler:
    """Stands for DeepSpeed's dynamic loss scaler."""


class _Stage(int):
    """Stands for `deepspeed.runtime.zero.config.ZeroStageEnum`."""


_SHELLS: list[Any] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_DynamicScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class ZeroFiles:
    """What the files of one ZeRO checkpoint hold, by rank; tensors are mapped, not read."""

    directory: Path
    stage: int
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]

    def refuse(self, problem: str) -> NoReturn:
        """Raise the error for a checkpoint that is not understood."""
        raise CheckpointError(
            f"{self.directory} is not understood: {problem}",
            because="ZeRO stages 1, 2 and 3 without model parallelism or experts are imported",
            remedy=_REMEDY,
        )


def is_zero(root: Path, tag: str | None) -> bool:
    """Whether `read_zero` would find files of ZeRO there, complete or not."""
    try:
        directory = _directory(root, tag)
    except ConfigError:
        return False
    return any(_MODEL.fullmatch(path.name) for path in directory.iterdir())


def read_zero(root: Path, tag: str | None) -> ZeroFiles:
    """The checkpoint `tag` below `root`, or the one that `latest` names, or `root` itself.

    Raises `ConfigError` if there is none, `CheckpointError` for what is not understood.
    """
    directory = _directory(root, tag)
    names = sorted(path.name for path in directory.iterdir())
    optimizers = _by_rank(directory, names, _OPTIMIZER)
    models = _by_rank(directory, names, _MODEL)
    found = ZeroFiles(directory, 0, (), ())
    if not optimizers or not models:
        found.refuse("it has no *_optim_states.pt or no *_model_states.pt of rank 0")
    experts = [name for name in names if _EXPERT.fullmatch(name)]
    if experts:
        found.refuse(f"{experts[0]} holds experts or layers of a pipeline")
    states = [_member(path, "optimizer_state_dict") for path in optimizers]
    stage = states[0].get("zero_stage")
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        found.refuse(f"its ZeRO stage is {stage!r:.40}")
    count = states[0].get("partition_count")
    counts = set(count) if isinstance(count, list) else {count}
    if counts != {len(states)}:
        found.refuse(f"it was written by {counts!r:.40} ranks, and there are {len(states)} files")
    if len(models) not in ((len(states),) if stage == 3 else (1, len(states))):
        found.refuse(f"{len(models)} model files and {len(states)} optimizer files")
    return ZeroFiles(directory, int(stage), [_load(path) for path in models], states)


def _directory(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory")
    if tag is None and (root / "latest").is_file():
        tag = (root / "latest").read_bytes()[:4096].decode(errors="replace").strip()
    if tag is None:
        return root
    if Path(tag).name != tag or tag in ("", ".", ".."):
        raise ConfigError(f"the tag {tag!r:.80} is no plain name")
    if not (root / tag).is_dir():
        raise ConfigError(f"there is no directory {root / tag}")
    return root / tag


def _by_rank(directory: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    """The files of ranks 0, 1, ... in that order."""
    found: dict[int, Path] = {}
    for name in names:
        if (match := pattern.fullmatch(name)) is None:
            continue
        rank = int(match[1] or 0)
        if int(match[2]) or rank in found:
            ZeroFiles(directory, 0, (), ()).refuse(f"{name} is of a model-parallel rank, or twice")
        found[rank] = directory / name
    if sorted(found) != list(range(len(found))):
        ZeroFiles(directory, 0, (), ()).refuse(f"files of ranks are missing among {sorted(found)}")
    return [found[rank] for rank in sorted(found)]


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with torch.serialization.safe_globals(_SHELLS):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path} cannot be read without running code from it: {first_lines(error)[:300]}",
            because="it is damaged, or holds objects that are not plain data",
            remedy=_REMEDY,
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a dict")
    return content


def _member(path: Path, key: str) -> Mapping[str, Any]:
    found = _load(path).get(key)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has no {key!r}", because="it is not of ZeRO", remedy=_REMEDY)
    return found


def flat_tensors(value: Any) -> list[Tensor] | None:
    """A list of dense tensors of floats in one dimension; None if it is anything else."""
    if not isinstance(value, list) or not all(isinstance(part, Tensor) for part in value):
        return None
    dense = all(p.layout is torch.strided and p.dim() == 1 for p in value)
    return value if dense and all(p.is_floating_point() for p in value) else None
