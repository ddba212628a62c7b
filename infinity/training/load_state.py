"""Loading of checkpoint streams into stored state of any placement, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from infinity.checkpoint.manifest import TensorSpec
from infinity.checkpoint.manifest_check import differences
from infinity.checkpoint.reader import StateReader
from infinity.checkpoint.streams import StreamRange, frozen_ranges, pieces, state_streams
from infinity.errors import CheckpointError, listed
from infinity.offload.state import StateStore
from infinity.plan.plan import Plan
from infinity.storage.staging import host_buffer
from infinity.types import Kind


def check_state(reader: StateReader, plan: Plan, rule: str) -> None:
    """Raise one `CheckpointError` with all mismatches between a checkpoint and this engine.

    Compares names, shapes, dtypes, precision, update rule and moment formats; changes nothing.
    """
    manifest = reader.manifest
    problems = []
    for name, saved, expected in (
        ("precision", manifest.precision, plan.precision.name),
        ("optimizer", manifest.rule, rule),
        ("moments", list(manifest.moments), [m.value for m in plan.precision.moments]),
    ):
        if saved != expected:
            problems.append(f"{name} {saved!r} there, {expected!r} here")
    if not problems:
        for stream, specs in state_streams(plan).items():
            problems += _differences(reader, stream, specs)
    if problems:
        raise CheckpointError(
            f"the checkpoint {reader.directory} does not fit this engine: "
            + listed(problems, separator="; "),
            remedy="make the engine with the settings it was saved under, or take the weights "
            "only: load_checkpoint(..., load_optimizer_states=False)",
        )


def _differences(reader: StateReader, stream: str, specs: list[TensorSpec]) -> list[str]:
    saved, expected = set(reader.names(stream)), {spec.name for spec in specs}
    where = f"in the stream {stream!r}"
    problems = [f"{name!r} is missing {where}" for name in sorted(expected - saved)]
    problems += [
        f"{name!r} is {where}, but this engine has no such state"
        for name in sorted(saved - expected)
    ]
    for spec in (spec for spec in specs if spec.name in saved):
        problems += differences(stream, reader.facts(stream, spec.name), spec.shape, spec.dtype)
    return problems


def load_state(reader: StateReader, plan: Plan, store: StateStore) -> None:
    """Replace all stored state, with one kind of one unit in RAM at a time.

    Raises `CheckpointError` at the first block whose checksum differs from the saved one.
    """
    for layout, shard in zip(plan.units, plan.local_units, strict=True):
        for kind in plan.precision.kinds:
            nbytes = store.shard_bytes(shard, kind)
            if not nbytes:
                continue
            flat = host_buffer(nbytes)
            for chunk in range(shard.num_chunks(plan.chunk_elements)):
                part = flat[plan.part(shard, kind, chunk)]
                _fill(reader, part, pieces(plan, shard, chunk, kind))
            if kind is Kind.WEIGHT and shard.frozen_bytes:
                frozen = flat[shard.trained_bytes :]
                full = frozen if shard is layout else host_buffer(layout.frozen_bytes)
                _fill(reader, full, frozen_ranges(layout))
                frozen.copy_(full.view(layout.shards, -1)[plan.rank])
            store.write_shard(layout.index, kind, flat)


def _fill(reader: StateReader, flat: Tensor, ranges: Iterable[StreamRange]) -> None:
    for piece in ranges:
        reader.read_into(piece.stream, piece.name, piece.first, flat[piece.byte_range])
