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
from infinity.model.weight_files import Outgoing
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.rules import RULES, AdamW, twin_of

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_.*\.pt|layer_[0-9]+-.*\.pt")
_REMEDY = "export the weights there as safetensors (zero_to_fp32.py --safe_serialization)"


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
            f"{self.directory} is not understood: {problem}",
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
    """Return the files that match `pattern`, ordered by rank."""
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
    """Return `value` if it is a list of dense one-dimensional float tensors, else None."""
    if not isinstance(value, list) or not all(isinstance(part, Tensor) for part in value):
        return None
    dense = all(p.layout is torch.strided and p.dim() == 1 for p in value)
    return value if dense and all(p.is_floating_point() for p in value) else None


# --- import --------------------------------------------------------------------------------------

_PIECE = 1 << 20  # elements
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
    found = _contents(files)
    streams = _streams(found)
    manifest = _manifest(files, engine_version, found)
    specs = {stream: [spec for spec, _ in tensors] for stream, tensors in streams.items()}
    writer = CheckpointWriter(root, files.directory.name, specs)
    try:
        for stream, tensors in streams.items():
            for piece in (piece for _, pieces in tensors for piece in pieces):
                writer.write(stream, _raw(piece))
        path = writer.finish(manifest)
    finally:
        writer.abort()
    steps, count = manifest.global_steps, len(manifest.parameters)
    return Imported(path, files.stage, len(files.optimizers), steps, count, found.moments)


def _contents(files: ZeroFiles, *, frozen: bool = True) -> _Contents:
    """Read the contents of all files; buffers are those of rank 0."""
    model = files.models[0]
    module = model.get("module")
    if not isinstance(module, dict) or not all(isinstance(v, Tensor) for v in module.values()):
        files.refuse("its model file has no tensors under 'module'")
    trained = _trained_of(files, module)
    names = tuple(m for m in _MOMENTS if all(m in one.moments for one in trained.values()))
    shared = model.get("shared_params") or {}
    buffers = [name for name in model.get("buffer_names") or [] if isinstance(name, str)]
    untrained = [n for n in module if not (n in trained or n in buffers or n in shared)]
    return _Contents(
        trained,
        _frozen_of(files, {n: module[n] for n in untrained}) if frozen else {},
        {name: module[name] for name in buffers if name in module},
        shared,
        names if len(names) == len(_MOMENTS) else (),
    )


def _streams(found: _Contents) -> dict[str, list[tuple[TensorSpec, Iterator[Tensor]]]]:
    """Return the tensors of each stream of the new checkpoint, with iterators over their slices."""
    trained, fp32 = found.trained.items(), torch.float32

    def half(one: _Trained, which: int) -> Iterator[Tensor]:
        """Yield slices of the weight (0), or of the residual or master (1)."""
        for piece in _pieces(one.master):
            master = piece.to(fp32)
            bf16 = one.dtype is torch.bfloat16
            yield (split(master) if bf16 else (master.to(one.dtype), master))[which]

    def beyond(dtype: torch.dtype, held: torch.dtype) -> list[tuple[TensorSpec, Iterator[Tensor]]]:
        kept = [(name, one) for name, one in trained if one.dtype is held]
        return [(TensorSpec(name, one.shape, dtype), half(one, 1)) for name, one in kept]

    streams = {
        MODEL: [(TensorSpec(n, one.shape, one.dtype), half(one, 0)) for n, one in trained],
        FROZEN: [
            (TensorSpec(n, shape, parts[0].dtype), _pieces(parts))
            for n, (shape, parts) in found.frozen.items()
        ],
        BUFFERS: [
            (TensorSpec(n, tuple(v.shape), v.dtype), iter([v.contiguous().reshape(-1)]))
            for n, v in found.buffers.items()
        ],
        RESIDUAL: beyond(torch.int16, torch.bfloat16),
        MASTER: beyond(fp32, torch.float16),
    }
    for number, moment in enumerate(found.moments, start=1):
        streams[moment_stream(number)] = [
            (TensorSpec(n, one.shape, fp32), (p.to(fp32) for p in _pieces(one.moments[moment])))
            for n, one in trained
        ]
    return streams


def _manifest(files: ZeroFiles, engine_version: str, found: _Contents) -> Manifest:
    aliases: dict[str, list[str]] = {}
    for alias, name in found.shared.items():
        if name not in found.trained and name not in found.frozen:
            files.refuse(f"{alias!r} is tied to {name!r}, which is not there")
        aliases.setdefault(name, []).append(alias)

    def record(
        name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int | None
    ) -> ParameterRecord:
        others, trained = tuple(aliases.get(name, ())), step is not None
        return ParameterRecord(name, others, shape, dtype_name(dtype), trained, step or 0)

    trained = [record(n, one.shape, one.dtype, one.step) for n, one in found.trained.items()]
    frozen = [record(n, shape, p[0].dtype, None) for n, (shape, p) in found.frozen.items()]
    dtypes = {one.dtype for one in found.trained.values()}
    precision = next((name for dtype, name in _PRECISIONS.items() if dtype in dtypes), "fp32")
    return Manifest(
        engine_version=engine_version,
        global_steps=_steps(files),
        precision=precision,
        rule=_rule(files),
        moments=("fp32",) * len(found.moments),
        parameters=(*trained, *frozen),
        buffers=tuple(
            BufferRecord(n, (), tuple(value.shape), dtype_name(value.dtype), True)
            for n, value in found.buffers.items()
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
    return name if coupled else twin_of(name, decoupled=True)


def _steps(files: ZeroFiles) -> int:
    steps = files.models[0].get("global_steps")
    if type(steps) is not int or steps < 0:
        files.refuse(f"its global_steps is {steps!r:.40}")
    return steps


def _pieces(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    for part in parts:
        for start in range(0, part.numel(), _PIECE):
            yield part[start : start + _PIECE].contiguous()


def _raw(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _shapes(files: ZeroFiles, key: str) -> list[dict[str, tuple[int, ...]]]:
    """Return shapes by name, one dict per parameter group."""
    found = files.models[0].get(key) or []
    groups = [found] if isinstance(found, dict) else found
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        files.refuse(f"its {key} is no list of dicts")
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _trained_of(files: ZeroFiles, module: Mapping[str, Tensor]) -> dict[str, _Trained]:
    """Return the trained parameters by name."""
    groups = _shapes(files, "param_shapes")
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    masters = [flat_tensors(state.get(key)) for state in files.optimizers]
    if any(one is None or len(one) != len(masters[0] or ()) for one in masters):
        files.refuse(f"its {key} is no list of flat tensors")
    states = [_states(files, state, len(masters[0] or ())) for state in files.optimizers]
    trained = {}
    locations = (
        _locations_3(files, groups, masters) if files.stage == 3 else _locations_12(files, groups)
    )
    for name, shape, group, where in locations:
        if name not in module:
            files.refuse(f"{name!r} has a shape, and is not in the model")
        lists: dict[str, list[Tensor]] = {}
        for what in ("master", *_MOMENTS):
            flats = masters if what == "master" else [[s.get(what) for s in one] for one in states]
            if all(part is not None for one in flats for part in one or ()):
                lists[what] = _gather(files, name, prod(shape), flats, where)
        step = _step_of(files, states[0][group])
        dtype = module[name].dtype
        dtype = dtype if dtype in _PRECISIONS else torch.float32
        trained[name] = _Trained(shape, dtype, step, lists.pop("master"), lists)
    return trained


def _states(files: ZeroFiles, optimizer: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the optimizer state of each flat tensor of a rank; empty if unknown."""
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    state = base.get("state", {}) if isinstance(base, dict) else base
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return [{} for _ in range(count)]
    found = []
    for index in range(count):
        one = state.get(index)
        one = one if isinstance(one, dict) else {}
        flat = {m: one[m] for m in _MOMENTS if flat_tensors([one.get(m)]) is not None}
        found.append({**flat, "step": one.get("step")})
    return found


def _step_of(files: ZeroFiles, state: Mapping[str, Any]) -> int:
    step = state.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, int | float) and step == step // 1 and 0 <= step < 2**53:
        return int(step)
    skipped = files.models[0].get("skipped_steps")
    return max(_steps(files) - (skipped if type(skipped) is int else 0), 0)


_Where = list[tuple[int, int, int, int]]  # rank, flat tensor, first element, count
_Location = tuple[str, tuple[int, ...], int, _Where]  # name, shape, group, ranges


def _covering(begin: int, left: int, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Map `left` elements from offset `begin` to concatenated tensors: (tensor, offset, count)."""
    for piece, length in enumerate(lengths):
        count = min(max(length - begin, 0), left)
        if count:
            yield piece, begin, count
        left -= count
        begin = max(begin - length, 0)


def _locations_12(
    files: ZeroFiles, groups: Sequence[dict[str, tuple[int, ...]]]
) -> Iterator[_Location]:
    paddings = files.optimizers[0].get("param_alignment_paddings")
    flats = [s["single_partition_of_fp32_groups"] for s in files.optimizers]
    if len(flats[0]) != len(groups):
        files.refuse(f"{len(groups)} groups of parameters, {len(flats[0])} of masters")
    for group, shapes in enumerate(groups):
        lengths = [flat[group].numel() for flat in flats]
        at = 0
        gaps = paddings[group] if isinstance(paddings, list) else [0] * len(shapes)
        if len(gaps) != len(shapes) or not all(type(gap) is int and gap >= 0 for gap in gaps):
            files.refuse("its param_alignment_paddings do not fit its parameters")
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            found = _covering(at, prod(shape), lengths)
            yield name, shape, group, [(rank, group, first, n) for rank, first, n in found]
            at += prod(shape) + gap
        spare = sum(lengths) - at
        if not -sum(gaps[-1:]) <= spare < 4 * len(lengths) + sum(gaps):
            files.refuse(f"group {group} has {sum(lengths)} masters for {at} elements")


def _locations_3(
    files: ZeroFiles,
    groups: Sequence[dict[str, tuple[int, ...]]],
    masters: Sequence[list[Tensor] | None],
) -> Iterator[_Location]:
    lengths = [part.numel() for part in masters[0] or ()]
    if any([part.numel() for part in one or ()] != lengths for one in masters):
        files.refuse("its ranks hold parts of different sizes")
    ranks, at = len(masters), 0
    for name, shape in ((n, s) for shapes in groups for n, s in shapes.items()):
        part = -(-prod(shape) // ranks)
        where: _Where = []
        for rank in range(ranks):
            held = min(part, max(prod(shape) - rank * part, 0))
            where += [(rank, flat, first, n) for flat, first, n in _covering(at, held, lengths)]
        group = max((flat for rank, flat, *_ in where if rank == 0), default=0)
        yield name, shape, group, where
        at += part
    if at != sum(lengths):
        files.refuse(f"its ranks hold {sum(lengths)} masters each, for {at} elements")


def _gather(
    files: ZeroFiles, name: str, numel: int, flats: Sequence[Any], where: _Where
) -> list[Tensor]:
    parts = [flats[rank][flat][first : first + count] for rank, flat, first, count in where]
    found = sum(part.numel() for part in parts)
    if found != numel:
        files.refuse(f"{name!r} has {numel} elements, and {found} of them are there")
    return parts


def _frozen_of(
    files: ZeroFiles, module: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], list[Tensor]]]:
    """Return the shape and slices of each frozen parameter in `module`."""
    known: dict[str, tuple[int, ...]] = {}
    for group in _shapes(files, "frozen_param_shapes"):
        known |= group
    frozen = {}
    for name, value in module.items():
        shape = known.get(name, tuple(value.shape))
        parts = [value]
        if files.stage == 3:
            fragments = [model.get("frozen_param_fragments") or {} for model in files.models]
            parts = [one[name] for one in fragments if isinstance(one.get(name), Tensor)]
        left, cut = prod(shape), []
        for part in parts:
            cut.append(part.reshape(-1)[:left])
            left -= cut[-1].numel()
        if left or not cut or len({part.dtype for part in cut}) > 1:
            files.refuse(f"the frozen parameter {name!r} is not there as a whole")
        frozen[name] = (shape, cut)
    return frozen


# --- fp32 weights --------------------------------------------------------------------------------


def deepspeed_weights(
    source: Path, tag: str | None = None, *, frozen: bool = True
) -> tuple[list[Outgoing], Mapping[str, str]]:
    """Return masters, frozen parameters (floats in fp32) and buffers, and the names of aliases.

    Supports the checkpoints of `import_deepspeed`, and raises the same errors.
    """
    found = _contents(read_zero(source, tag), frozen=frozen)
    parts = {name: (one.shape, one.master) for name, one in found.trained.items()} | found.frozen
    tensors = [
        _outgoing(name, shape, pieces, torch.float32 if pieces[0].is_floating_point() else None)
        for name, (shape, pieces) in parts.items()
    ]
    tensors += [_outgoing(n, tuple(v.shape), [v], None) for n, v in found.buffers.items()]
    return tensors, {alias: name for alias, name in found.shared.items() if name in parts}


def _outgoing(
    name: str, shape: tuple[int, ...], pieces: Sequence[Tensor], dtype: torch.dtype | None
) -> Outgoing:
    stored = dtype or pieces[0].dtype

    def read() -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in pieces]).to(stored).view(shape)

    return Outgoing(name, shape, stored, read)
