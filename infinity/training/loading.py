"""The streams of a checkpoint into homes, whatever their placement, unit by unit."""

from __future__ import annotations

from torch import Tensor

from infinity.checkpoint.layout import FROZEN
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import TensorSpec
from infinity.errors import CheckpointError, listed
from infinity.memory.host import HostArena
from infinity.memory.state import StateStore
from infinity.plan.layout import Kind, UnitLayout
from infinity.plan.plan import Plan
from infinity.training.saving import state_streams, stream_parts


def check_state(reader: CheckpointReader, plan: Plan, rule: str) -> None:
    """Raise one `CheckpointError` with all that does not fit the homes of this engine.

    Names, shapes, dtypes, precision, update rule and moment formats; nothing is changed.
    """
    manifest = reader.manifest
    problems = []
    for what, there, here in (
        ("precision", manifest.precision, plan.precision.name),
        ("optimizer", manifest.rule, rule),
        ("moments", list(manifest.moments), [m.value for m in plan.precision.moments]),
    ):
        if there != here:
            problems.append(f"{what} {there!r} there, {here!r} here")
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


def _differences(reader: CheckpointReader, stream: str, specs: list[TensorSpec]) -> list[str]:
    there, here = set(reader.names(stream)), {spec.name for spec in specs}
    problems = [f"{name!r} is missing in {stream}" for name in sorted(here - there)]
    problems += [f"{name!r} is in {stream}, but not in the model" for name in sorted(there - here)]
    for spec in specs:
        if spec.name in there:
            facts = reader.facts(stream, spec.name)
            if facts.shape != tuple(spec.shape):
                problems.append(f"{spec.name!r} has shape {facts.shape}, not {tuple(spec.shape)}")
            elif facts.dtype is not spec.dtype:
                problems.append(f"{spec.name!r} is {facts.dtype} in {stream}, not {spec.dtype}")
    return problems


class Loader:
    """Reads streams in the order of homes; one kind of one unit in RAM at a time."""

    def __init__(self, reader: CheckpointReader, plan: Plan, store: StateStore) -> None:
        self._reader = reader
        self._plan = plan
        self._store = store

    def load(self) -> None:
        """Replace every home; raises `CheckpointError` at the first byte that is not as saved."""
        for layout in self._plan.units:
            self._load_unit(layout)

    def _load_unit(self, layout: UnitLayout) -> None:
        for kind in self._plan.precision.kinds:
            nbytes = self._store.home_bytes(layout, kind)
            if not nbytes:
                continue
            flat = HostArena(nbytes).view(0, nbytes)  # zeroed
            self._load_trained(layout, kind, flat)
            if kind is Kind.WEIGHT:
                self._load_frozen(layout, flat[layout.trained_bytes :])
            self._store.write(layout.index, kind, flat)

    def _load_trained(self, layout: UnitLayout, kind: Kind, flat: Tensor) -> None:
        plan, done = self._plan, dict[tuple[str, str], int]()
        for chunk in range(layout.num_chunks(plan.chunk_elements)):
            view = flat[plan.part(layout, kind, chunk)]
            for segment in layout.trained_segments:
                for stream, part in stream_parts(plan, layout, segment, chunk, kind, view):
                    first = done.get((stream, segment.name), 0)
                    self._reader.read_into(stream, segment.name, first, part)
                    done[stream, segment.name] = first + part.numel()

    def _load_frozen(self, layout: UnitLayout, flat: Tensor) -> None:
        for segment in (s for s in layout.segments if not s.trained):
            part = flat[segment.offset : segment.offset + segment.nbytes]
            self._reader.read_into(FROZEN, segment.name, 0, part)
