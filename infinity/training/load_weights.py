"""`load_weights`: safetensors files streamed to a model's tensors on any tier.

Names, shapes and dtypes are checked first, from the headers, and all problems are reported at once.
Then one tensor at a time is read, in an order in which every unit is written once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError, MachineError
from infinity.model.buffers import persistent_buffers
from infinity.model.meta_init import remember_values
from infinity.model.parameter_map import ParameterMap
from infinity.model.safetensors_file import TensorEntry
from infinity.model.weight_files import StoredTensor, WeightFiles
from infinity.training.state_dict import StateEntry, copy_into

Rename = Callable[[str], str | None]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUM_NEAREST = 5  # missing names to find the closest match of, which is slow
_NUM_COMPARED = 2000  # names of the file to compare each with


@dataclass(frozen=True)
class LoadedWeights:
    """Result of `load_weights`.

    Attributes:
        missing: Names of the model without values in the file.
        unexpected: Names of the file that the model does not have.
        loaded: Names of the model that have new values.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    loaded: tuple[str, ...]


def load_weights(
    target: Engine | nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedWeights:
    """Load safetensors into an engine or a module, one tensor at a time.

    Floating-point values are converted. In an engine, fp32 values become masters without rounding;
    where bf16 values equal the current weight, the residual is unchanged. Optimizer state is not
    changed.

    Args:
        target: An engine, or a module. Parameters of a module on the meta device are read later, by
            `initialize`.
        source: A file, a directory, or an index of shards.
        strict: Raise if names are missing or unexpected. If False, raise only if no name fits.
        rename: Maps a name of the file to one of the model, or to None to skip the tensor. One name
            of tied weights is enough.

    Returns:
        The names that were missing, unexpected and loaded.

    Raises:
        ConfigError: Names or shapes do not fit; all are listed, and nothing was changed.
        MachineError: A file cannot be read to its end; the message states how much was loaded. All
            ranks of an engine raise if one does.
    """
    state = Engine.state_dict(target) if isinstance(target, Engine) else None
    module = target.module if isinstance(target, Engine) else target
    entries = _entries_of(module) if state is None else state.entries()
    with ExitStack() as stack:
        if isinstance(target, Engine):
            stack.enter_context(target.ranks.collective_section("loads weights"))
        files = stack.enter_context(WeightFiles(source))
        match = _match(files, entries, rename)
        if match.problems or not match.matched or (strict and (match.missing or match.unexpected)):
            raise _mismatch_error(source, match, strict=strict)
        try:
            deferred_reads = _write(files, match.matched)
        except BaseException:
            if state is not None:
                state.abandon()
            raise
        if state is not None:
            state.flush()
        if deferred_reads:
            remember_values(module, deferred_reads)
            stack.pop_all()  # the remembered reads need the files open
    return LoadedWeights(
        missing=tuple(entry.names[0] for entry in match.missing),
        unexpected=tuple(match.unexpected.values()),
        loaded=tuple(name for entry, _ in match.matched for name in entry.names),
    )


def _entries_of(module: nn.Module) -> list[StateEntry]:
    """Return the tensors of a plain module; raise `ConfigError` for one that cannot be loaded."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"load_weights takes an engine or a module, got {type(module).__name__}")
    if any(isinstance(child._parameters, ParameterMap) for child in module.modules()):
        raise ConfigError(
            "the weights of this module belong to an engine", remedy="load_weights(engine, ...)"
        )
    named = {**dict(module.named_parameters(remove_duplicate=False)), **persistent_buffers(module)}
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name!r} has no shape yet", remedy="run a forward first")
        names.setdefault(id(tensor), []).append(name)
    return [
        StateEntry(
            tuple(names[id(tensor)]),
            tuple(tensor.shape),
            tensor.dtype,
            None if tensor.is_meta else partial(copy_into, tensor),
        )
        for tensor in {id(tensor): tensor for tensor in named.values()}.values()
    ]


def _write(
    files: WeightFiles, matched: Sequence[tuple[StateEntry, str]]
) -> dict[str, Callable[[], Tensor]]:
    """Write the values of all entries; return how to read those of entries on the meta device."""
    deferred_reads: dict[str, Callable[[], Tensor]] = {}
    for done, (entry, name) in enumerate(matched):
        if entry.write is None:
            deferred_reads[entry.names[0]] = StoredTensor(files, name)
            continue
        try:
            value = files.read(name)
        except InfinityError as error:
            raise MachineError(
                f"{error.what}; {done} of {len(matched)} tensors were loaded before",
                because=error.because,
                remedy="loaded values stay: load again before you train or save",
            ) from error
        entry.write(value)
    return deferred_reads


# --- matching ----------------------------------------------------------------------------------


@dataclass
class _Match:
    """Entries with the name of their values in the file, and everything without a counterpart.

    `unexpected` maps names after renaming to names in the file, `shapes` maps them to shapes.
    """

    matched: list[tuple[StateEntry, str]] = field(default_factory=list)
    missing: list[StateEntry] = field(default_factory=list)
    unexpected: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _match(files: WeightFiles, entries: Sequence[StateEntry], rename: Rename | None) -> _Match:
    match = _Match()
    for name, facts in files.facts.items():
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename({name!r}) returned {new!r}, not a name or None")
        if new in match.unexpected:
            both = f"{match.unexpected[new]!r} and {name!r}"
            match.problems.append(f"rename makes {new!r} of both {both}")
        match.unexpected[new] = name
        match.shapes[new] = facts.shape
    for entry in entries:
        file_names = [
            match.unexpected.pop(name) for name in entry.names if name in match.unexpected
        ]
        if not file_names:
            match.missing.append(entry)
            continue
        match.matched.append((entry, file_names[0]))
        mismatches = [
            text for name in file_names if (text := _mismatch(entry, name, files.facts[name]))
        ]
        match.problems += mismatches
        for other in file_names[1:]:
            if not mismatches and not files.equal(file_names[0], other):
                match.problems.append(
                    f"{file_names[0]!r} and {other!r} are tied in the model and differ in the file "
                    "(rename one of them to None)"
                )
    return match


def _mismatch(entry: StateEntry, name: str, facts: TensorEntry) -> str | None:
    if facts.shape != entry.shape:
        return f"{name!r} has shape {facts.shape}, not {entry.shape}"
    if facts.dtype is entry.dtype or (facts.dtype in _FLOATS and entry.dtype in _FLOATS):
        return None
    # Otherwise integer codes of a quantized model would be loaded as weights.
    given, wanted = (str(d).removeprefix("torch.") for d in (facts.dtype, entry.dtype))
    return f"{name!r} holds {given}, which does not convert to {wanted}"


def _mismatch_error(source: str | os.PathLike[str], match: _Match, *, strict: bool) -> ConfigError:
    """Return one error that lists all mismatches, with a hint if names are nearly right."""
    problems: list[str] = []
    because = remedy = None
    missing, unexpected = match.missing, match.unexpected
    if strict or not match.matched:
        remedy = "strict=False ignores missing and unexpected names" if match.matched else None
        change = _best_prefix_change(missing, unexpected, match.shapes)
        if change is not None:
            example = next(name for name in unexpected if name in change.pairs)
            because = f"names differ at their beginning, as in {unexpected[example]!r}"
            remedy = f"rename=lambda name: {change.new!r} + name.removeprefix({change.old!r})"
            problems.append(
                f"{len(change.pairs)} names have {change.old!r} in the file where the model has "
                f"{change.new!r}"
            )
            explained = set(change.pairs.values())
            missing = [entry for entry in missing if explained.isdisjoint(entry.names)]
            unexpected = {n: f for n, f in unexpected.items() if n not in change.pairs}
        else:
            candidates = list(unexpected)[:_NUM_COMPARED]
            names = [entry.names[0] for entry in missing[:_NUM_NEAREST]]
            closest = {name: difflib.get_close_matches(name, candidates, 1) for name in names}
            pairs = [f"{name!r} may be {found[0]!r}" for name, found in closest.items() if found]
            because = f"in the file {', '.join(pairs)}" if pairs else None
        if missing:
            listed = ", ".join(" or ".join(map(repr, entry.names)) for entry in missing)
            problems.append(f"{len(missing)} missing: {listed}")
        if unexpected:
            listed = ", ".join(map(repr, unexpected.values()))
            problems.append(f"{len(unexpected)} unexpected: {listed}")
    problems += match.problems
    text = "; ".join(problems) or "there are no tensors in it"
    return ConfigError(f"{source} does not fit the model: {text}", because=because, remedy=remedy)


@dataclass
class _PrefixChange:
    """Replacement of a name prefix; `pairs` maps names of the file to the resulting names."""

    old: str
    new: str
    pairs: dict[str, str] = field(default_factory=dict)


def _best_prefix_change(
    missing: Sequence[StateEntry],
    unexpected: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> _PrefixChange | None:
    """Return the prefix replacement that explains most names; None below half of them."""
    missing_shapes = {name: entry.shape for entry in missing for name in entry.names}
    file_names = list(unexpected)
    best = None
    for sample in (
        {file_names[0], file_names[len(file_names) // 2], file_names[-1]} if file_names else ()
    ):
        candidates = [name for name, shape in missing_shapes.items() if shape == shapes[sample]]
        for name in sorted(candidates, key=lambda n: -_num_common_components(n, sample))[:4]:
            num_common = _num_common_components(name, sample)
            if not num_common:
                continue
            suffix = ".".join(name.split(".")[-num_common:])
            change = _PrefixChange(sample.removesuffix(suffix), name.removesuffix(suffix))
            for other in file_names:
                new = change.new + other.removeprefix(change.old)
                if other.startswith(change.old) and missing_shapes.get(new) == shapes[other]:
                    change.pairs[other] = new
            if best is None or len(change.pairs) > len(best.pairs):
                best = change
    enough = best is not None and 2 * len(best.pairs) >= min(len(missing), len(unexpected))
    return best if enough else None


def _num_common_components(name: str, other: str) -> int:
    """Return the number of dotted components that two names share at their ends."""
    count = 0
    for a, b in zip(reversed(name.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        count += 1
    return count
