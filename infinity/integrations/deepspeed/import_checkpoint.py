"""Import of DeepSpeed ZeRO checkpoints, and reading of their fp32 weights.

The files are pickles. torch's restricted unpickler (`weights_only=True`) reads tensors, containers
and numbers; a few DeepSpeed classes are replaced by placeholders without code. Any other object is
an error.

ZeRO 1 and 2 concatenate the parameters of a group and cut the result into one partition per rank.
ZeRO 3 cuts each parameter into equal partitions, the last one padded, and concatenates the
partitions of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinity.checkpoint.manifest import (
    BUFFERS,
    FROZEN,
    MASTER,
    MODEL,
    RESIDUAL,
    BufferRecord,
    Manifest,
    ParameterRecord,
    TensorSpec,
    moment_stream,
)
from infinity.checkpoint.plain import dtype_name
from infinity.checkpoint.reader import split
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import CheckpointError, ConfigError, first_lines
from infinity.integrations.deepspeed.keys import BUILT_IN
from infinity.model.weight_files import TensorToWrite
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.rules import RULES, AdamW, decay_variant

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_.*\.pt|layer_[0-9]+-.*\.pt")
_REMEDY = "export the weights with DeepSpeed (zero_to_fp32.py --safe_serialization)"


class _Shell:
    """Placeholder for a pickled DeepSpeed object with plain data: an address, a loss scaler."""


class _Stage(int):
    """Placeholder for `deepspeed.runtime.zero.config.ZeroStageEnum`."""


_SHELLS: list[Any] = [
    (_Shell, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Shell, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Shell, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class ZeroFiles:
    """Files of one ZeRO checkpoint, by rank; tensors are memory-mapped."""

    directory: Path
    stage: int
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]

    def refuse(self, problem: str) -> NoReturn:
        """Raise `CheckpointError` for an unsupported checkpoint."""
        raise CheckpointError(
            f"{self.directory} is not supported: {problem}",
            because="ZeRO stages 1, 2 and 3 without model parallelism or experts are imported",
            remedy=_REMEDY,
        )


def is_zero(root: Path, tag: str | None) -> bool:
    """Return whether the directory has ZeRO files, complete or not."""
    try:
        directory = _directory(root, tag)
    except ConfigError:
        return False
    return any(_MODEL.fullmatch(path.name) for path in directory.iterdir())


def read_zero(root: Path, tag: str | None) -> ZeroFiles:
    """Open the checkpoint `tag` below `root`; without a tag the one in `latest`, or `root` itself.

    Raises `ConfigError` if there is none, `CheckpointError` if it is not supported.
    """
    directory = _directory(root, tag)
    names = sorted(path.name for path in directory.iterdir())
    optimizers = _by_rank(directory, names, _OPTIMIZER)
    models = _by_rank(directory, names, _MODEL)
    files = ZeroFiles(directory, 0, (), ())
    if not optimizers or not models:
        files.refuse("it has no *_optim_states.pt or no *_model_states.pt of rank 0")
    experts = [name for name in names if _EXPERT.fullmatch(name)]
    if experts:
        files.refuse(f"{experts[0]} holds experts or layers of a pipeline")
    states: list[Mapping[str, Any]] = []
    for path in optimizers:
        state = _load(path).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{path} has no 'optimizer_state_dict'",
                because="it is not a ZeRO checkpoint file",
                remedy=_REMEDY,
            )
        states.append(state)
    stage = states[0].get("zero_stage")
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        files.refuse(f"its ZeRO stage is {stage!r:.40}")
    count = states[0].get("partition_count")
    counts = set(count) if isinstance(count, list) else {count}
    if counts != {len(states)}:
        files.refuse(f"it was written by {counts!r:.40} ranks, and there are {len(states)} files")
    if len(models) not in ((len(states),) if stage == 3 else (1, len(states))):
        files.refuse(f"{len(models)} model files and {len(states)} optimizer files")
    return ZeroFiles(directory, int(stage), [_load(path) for path in models], states)


def _directory(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory")
    if tag is None and (root / "latest").is_file():
        tag = (root / "latest").read_bytes()[:4096].decode(errors="replace").strip()
    if tag is None:
        return root
    if Path(tag).name != tag or tag in ("", ".", ".."):
        raise ConfigError(f"the tag {tag!r:.80} is not a plain name")
    if not (root / tag).is_dir():
        raise ConfigError(f"there is no directory {root / tag}")
    return root / tag


def _by_rank(directory: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    """Return the files that match `pattern`, ordered by rank."""
    by_rank: dict[int, Path] = {}
    for name in names:
        if (match := pattern.fullmatch(name)) is None:
            continue
        rank = int(match[1] or 0)
        if int(match[2]) or rank in by_rank:
            ZeroFiles(directory, 0, (), ()).refuse(
                f"{name} belongs to a model-parallel rank, or is a duplicate"
            )
        by_rank[rank] = directory / name
    if sorted(by_rank) != list(range(len(by_rank))):
        ZeroFiles(directory, 0, (), ()).refuse(
            f"files of ranks are missing: there are only {sorted(by_rank)}"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


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


def flat_tensors(value: Any) -> list[Tensor] | None:
    """Return `value` if it is a list of dense one-dimensional float tensors, else None."""
    if not isinstance(value, list) or not all(isinstance(item, Tensor) for item in value):
        return None
    dense = all(t.layout is torch.strided and t.dim() == 1 for t in value)
    return value if dense and all(t.is_floating_point() for t in value) else None


# --- import --------------------------------------------------------------------------------------

_CHUNK = 1 << 20  # elements
_MOMENTS = AdamW.state_names  # DeepSpeed's names too
# Dtypes of trained parameters in the new checkpoint; any other dtype becomes fp32.
_PRECISIONS = {d: name for name, d in COMPUTE_DTYPES.items() if d is not torch.float32}


@dataclass(frozen=True)
class Imported:
    """Result of an import; `moments` are the imported state names ("exp_avg", ...)."""

    path: Path
    stage: int
    ranks: int
    global_steps: int
    parameters: int
    moments: tuple[str, ...]


@dataclass
class _Trained:
    """A trained parameter: dtype in the model, number of updates, and its values in slices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    step: int
    master: list[Tensor]
    moments: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Contents:
    """Contents of a ZeRO checkpoint by name; `frozen` has the shape and slices of a parameter."""

    trained: dict[str, _Trained]
    frozen: dict[str, tuple[tuple[int, ...], list[Tensor]]]
    buffers: dict[str, Tensor]
    shared: Mapping[str, str]
    moments: tuple[str, ...]


def import_deepspeed(
    source: Path, root: Path, engine_version: str, tag: str | None = None
) -> Imported:
    """Convert the ZeRO checkpoint below `source` to `ROOT/TAG`, under the same tag.

    Parameters with bf16 weights become weights and residuals, with fp16 weights and masters, others
    fp32. Optimizer settings, schedules, loss scales and random states are not imported. Raises
    `ConfigError` if there is no checkpoint, `CheckpointError` if it is not supported, and the
    errors of `CheckpointWriter`.
    """
    files = read_zero(source, tag)
    contents = _read_contents(files)
    streams = _streams(contents)
    manifest = _manifest(files, engine_version, contents)
    specs = {stream: [spec for spec, _ in tensors] for stream, tensors in streams.items()}
    writer = CheckpointWriter(root, files.directory.name, specs)
    try:
        for stream, tensors in streams.items():
            for chunk in (chunk for _, chunks in tensors for chunk in chunks):
                writer.write(stream, chunk.view(torch.uint8))
        path = writer.finish(manifest)
    finally:
        writer.abort()
    steps, count = manifest.global_steps, len(manifest.parameters)
    return Imported(path, files.stage, len(files.optimizers), steps, count, contents.moments)


def _read_contents(files: ZeroFiles, *, frozen: bool = True) -> _Contents:
    """Read the contents of all files; buffers are those of rank 0."""
    model = files.models[0]
    module = model.get("module")
    if not isinstance(module, dict) or not all(isinstance(v, Tensor) for v in module.values()):
        files.refuse("its model file has no tensors under 'module'")
    trained = _read_trained(files, module)
    moments = tuple(
        m for m in _MOMENTS if all(m in parameter.moments for parameter in trained.values())
    )
    shared = model.get("shared_params") or {}
    buffers = [name for name in model.get("buffer_names") or [] if isinstance(name, str)]
    untrained = [n for n in module if not (n in trained or n in buffers or n in shared)]
    return _Contents(
        trained,
        _read_frozen(files, {n: module[n] for n in untrained}) if frozen else {},
        {name: module[name] for name in buffers if name in module},
        shared,
        moments if len(moments) == len(_MOMENTS) else (),
    )


def _streams(contents: _Contents) -> dict[str, list[tuple[TensorSpec, Iterator[Tensor]]]]:
    """Return the tensors of each stream of the new checkpoint, with iterators over their slices."""
    trained, fp32 = contents.trained.items(), torch.float32

    def chunks_of(parameter: _Trained, index: int) -> Iterator[Tensor]:
        """Yield slices of the weight (0), or of the residual or master (1)."""
        for chunk in _chunks(parameter.master):
            master = chunk.to(fp32)
            bf16 = parameter.dtype is torch.bfloat16
            yield (split(master) if bf16 else (master.to(parameter.dtype), master))[index]

    def second_stream(
        dtype: torch.dtype, weight_dtype: torch.dtype
    ) -> list[tuple[TensorSpec, Iterator[Tensor]]]:
        return [
            (TensorSpec(name, parameter.shape, dtype), chunks_of(parameter, 1))
            for name, parameter in trained
            if parameter.dtype is weight_dtype
        ]

    streams = {
        MODEL: [
            (TensorSpec(n, parameter.shape, parameter.dtype), chunks_of(parameter, 0))
            for n, parameter in trained
        ],
        FROZEN: [
            (TensorSpec(n, shape, slices[0].dtype), _chunks(slices))
            for n, (shape, slices) in contents.frozen.items()
        ],
        BUFFERS: [
            (TensorSpec(n, tuple(v.shape), v.dtype), _chunks([v.reshape(-1)]))
            for n, v in contents.buffers.items()
        ],
        RESIDUAL: second_stream(torch.int16, torch.bfloat16),
        MASTER: second_stream(fp32, torch.float16),
    }
    for number, moment in enumerate(contents.moments, start=1):
        streams[moment_stream(number)] = [
            (
                TensorSpec(n, parameter.shape, fp32),
                (p.to(fp32) for p in _chunks(parameter.moments[moment])),
            )
            for n, parameter in trained
        ]
    return streams


def _manifest(files: ZeroFiles, engine_version: str, contents: _Contents) -> Manifest:
    aliases: dict[str, list[str]] = {}
    for alias, name in contents.shared.items():
        if name not in contents.trained and name not in contents.frozen:
            files.refuse(f"{alias!r} is tied to {name!r}, which is missing")
        aliases.setdefault(name, []).append(alias)

    def record(
        name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int | None
    ) -> ParameterRecord:
        others, trained = tuple(aliases.get(name, ())), step is not None
        return ParameterRecord(name, others, shape, dtype_name(dtype), trained, step or 0)

    trained = [
        record(n, parameter.shape, parameter.dtype, parameter.step)
        for n, parameter in contents.trained.items()
    ]
    frozen = [record(n, shape, p[0].dtype, None) for n, (shape, p) in contents.frozen.items()]
    dtypes = {parameter.dtype for parameter in contents.trained.values()}
    precision = next((name for dtype, name in _PRECISIONS.items() if dtype in dtypes), "fp32")
    return Manifest(
        engine_version=engine_version,
        global_steps=_steps(files),
        precision=precision,
        rule=_rule(files),
        moments=("fp32",) * len(contents.moments),
        parameters=(*trained, *frozen),
        buffers=tuple(
            BufferRecord(n, (), tuple(value.shape), dtype_name(value.dtype), True)
            for n, value in contents.buffers.items()
        ),
        run={},
        client_state={},
        config={},
        plan=None,
    )


def _rule(files: ZeroFiles) -> str:
    """Return infinity's name of the update rule; DeepSpeed's "Adam" is AdamW by default."""
    config = files.models[0].get("ds_config")
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    name = BUILT_IN.get(kind.lower()) if isinstance(kind, str) else None
    if name is None or RULES[name].decoupled is None:
        return kind if isinstance(kind, str) else "unknown"
    settings = optimizer.get("params") if isinstance(optimizer, dict) else None
    coupled = isinstance(settings, dict) and settings.get("adam_w_mode") is False
    return name if coupled else decay_variant(name, decoupled=True)


def _steps(files: ZeroFiles) -> int:
    steps = files.models[0].get("global_steps")
    if type(steps) is not int or steps < 0:
        files.refuse(f"its global_steps is {steps!r:.40}")
    return steps


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        for start in range(0, tensor.numel(), _CHUNK):
            yield tensor[start : start + _CHUNK].contiguous()


def _shapes(files: ZeroFiles, key: str) -> list[dict[str, tuple[int, ...]]]:
    """Return shapes by name, one dict per parameter group."""
    value = files.models[0].get(key) or []
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        files.refuse(f"its {key} is no list of dicts")
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _read_trained(files: ZeroFiles, module: Mapping[str, Tensor]) -> dict[str, _Trained]:
    """Return the trained parameters by name."""
    groups = _shapes(files, "param_shapes")
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    masters = [flat_tensors(state.get(key)) for state in files.optimizers]
    if any(tensors is None or len(tensors) != len(masters[0] or ()) for tensors in masters):
        files.refuse(f"its {key} is no list of flat tensors")
    states = [_states(files, state, len(masters[0] or ())) for state in files.optimizers]
    trained = {}
    locations = (
        _locations_3(files, groups, masters) if files.stage == 3 else _locations_12(files, groups)
    )
    for name, shape, group, ranges in locations:
        if name not in module:
            files.refuse(f"{name!r} has a shape, but is not in the model")
        slices: dict[str, list[Tensor]] = {}
        for kind in ("master", *_MOMENTS):
            by_rank: Sequence[Any] = masters
            if kind != "master":
                by_rank = [[state.get(kind) for state in of_rank] for of_rank in states]
            if all(tensor is not None for tensors in by_rank for tensor in tensors or ()):
                slices[kind] = _gather(files, name, prod(shape), by_rank, ranges)
        step = _step_of(files, states[0][group])
        dtype = module[name].dtype
        dtype = dtype if dtype in _PRECISIONS else torch.float32
        trained[name] = _Trained(shape, dtype, step, slices.pop("master"), slices)
    return trained


def _states(files: ZeroFiles, optimizer: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the optimizer state of each flat tensor of a rank; empty if unknown."""
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    state = base.get("state", {}) if isinstance(base, dict) else base
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return [{} for _ in range(count)]
    states = []
    for index in range(count):
        entry = state.get(index)
        entry = entry if isinstance(entry, dict) else {}
        flat = {m: entry[m] for m in _MOMENTS if flat_tensors([entry.get(m)]) is not None}
        states.append({**flat, "step": entry.get("step")})
    return states


def _step_of(files: ZeroFiles, state: Mapping[str, Any]) -> int:
    step = state.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, int | float) and step == step // 1 and 0 <= step < 2**53:
        return int(step)
    skipped = files.models[0].get("skipped_steps")
    return max(_steps(files) - (skipped if type(skipped) is int else 0), 0)


_Ranges = list[tuple[int, int, int, int]]  # rank, flat tensor, first element, count
_Location = tuple[str, tuple[int, ...], int, _Ranges]  # name, shape, group, ranges


def _locate(offset: int, remaining: int, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Map `remaining` elements from `offset` on to concatenated tensors: (index, offset, count)."""
    for index, length in enumerate(lengths):
        count = min(max(length - offset, 0), remaining)
        if count:
            yield index, offset, count
        remaining -= count
        offset = max(offset - length, 0)


def _locations_12(
    files: ZeroFiles, groups: Sequence[dict[str, tuple[int, ...]]]
) -> Iterator[_Location]:
    paddings = files.optimizers[0].get("param_alignment_paddings")
    flats = [s["single_partition_of_fp32_groups"] for s in files.optimizers]
    if len(flats[0]) != len(groups):
        files.refuse(f"{len(groups)} groups of parameters, {len(flats[0])} of masters")
    for group, shapes in enumerate(groups):
        lengths = [flat[group].numel() for flat in flats]
        offset = 0
        gaps = paddings[group] if isinstance(paddings, list) else [0] * len(shapes)
        if len(gaps) != len(shapes) or not all(type(gap) is int and gap >= 0 for gap in gaps):
            files.refuse("its param_alignment_paddings do not fit its parameters")
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            covered = _locate(offset, prod(shape), lengths)
            yield name, shape, group, [(rank, group, first, n) for rank, first, n in covered]
            offset += prod(shape) + gap
        spare = sum(lengths) - offset
        if not -sum(gaps[-1:]) <= spare < 4 * len(lengths) + sum(gaps):
            files.refuse(f"group {group} has {sum(lengths)} masters for {offset} elements")


def _locations_3(
    files: ZeroFiles,
    groups: Sequence[dict[str, tuple[int, ...]]],
    masters: Sequence[list[Tensor] | None],
) -> Iterator[_Location]:
    lengths = [tensor.numel() for tensor in masters[0] or ()]
    if any([tensor.numel() for tensor in tensors or ()] != lengths for tensors in masters):
        files.refuse("its ranks have partitions of different sizes")
    ranks, offset = len(masters), 0
    for name, shape in ((n, s) for shapes in groups for n, s in shapes.items()):
        shard_size = -(-prod(shape) // ranks)
        ranges: _Ranges = []
        for rank in range(ranks):
            count = min(shard_size, max(prod(shape) - rank * shard_size, 0))
            ranges += [(rank, flat, first, n) for flat, first, n in _locate(offset, count, lengths)]
        group = max((flat for rank, flat, *_ in ranges if rank == 0), default=0)
        yield name, shape, group, ranges
        offset += shard_size
    if offset != sum(lengths):
        files.refuse(f"its ranks hold {sum(lengths)} masters each, for {offset} elements")


def _gather(
    files: ZeroFiles, name: str, numel: int, flats: Sequence[Any], ranges: _Ranges
) -> list[Tensor]:
    slices = [flats[rank][flat][first : first + count] for rank, flat, first, count in ranges]
    available = sum(item.numel() for item in slices)
    if available != numel:
        files.refuse(f"{name!r} has {numel} elements, but the files have {available}")
    return slices


def _read_frozen(
    files: ZeroFiles, module: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], list[Tensor]]]:
    """Return the shape and slices of each frozen parameter in `module`."""
    known: dict[str, tuple[int, ...]] = {}
    for group in _shapes(files, "frozen_param_shapes"):
        known |= group
    frozen = {}
    for name, value in module.items():
        shape = known.get(name, tuple(value.shape))
        tensors = [value]
        if files.stage == 3:
            fragments = [model.get("frozen_param_fragments") or {} for model in files.models]
            tensors = [
                of_rank[name] for of_rank in fragments if isinstance(of_rank.get(name), Tensor)
            ]
        remaining, slices = prod(shape), []
        for tensor in tensors:
            slices.append(tensor.reshape(-1)[:remaining])
            remaining -= slices[-1].numel()
        if remaining or not slices or len({tensor.dtype for tensor in slices}) > 1:
            files.refuse(f"the frozen parameter {name!r} is incomplete")
        frozen[name] = (shape, slices)
    return frozen


# --- fp32 weights --------------------------------------------------------------------------------


def deepspeed_weights(
    source: Path, tag: str | None = None, *, frozen: bool = True
) -> tuple[list[TensorToWrite], Mapping[str, str]]:
    """Return masters, frozen parameters (floats in fp32) and buffers, and the names of aliases.

    Supports the checkpoints of `import_deepspeed`, and raises the same errors.
    """
    contents = _read_contents(read_zero(source, tag), frozen=frozen)
    values = {
        name: (parameter.shape, parameter.master) for name, parameter in contents.trained.items()
    } | contents.frozen
    tensors = [
        _outgoing(name, shape, slices, torch.float32 if slices[0].is_floating_point() else None)
        for name, (shape, slices) in values.items()
    ]
    tensors += [_outgoing(n, tuple(v.shape), [v], None) for n, v in contents.buffers.items()]
    return tensors, {alias: name for alias, name in contents.shared.items() if name in values}


def _outgoing(
    name: str, shape: tuple[int, ...], slices: Sequence[Tensor], dtype: torch.dtype | None
) -> TensorToWrite:
    stored = dtype or slices[0].dtype

    def read() -> Tensor:
        return torch.cat([item.reshape(-1) for item in slices]).to(stored).view(shape)

    return TensorToWrite(name, shape, stored, read)
