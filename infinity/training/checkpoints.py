"""Checkpoints of an engine: saved during training, loaded under any placement."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.commits import PER_RANK_KEYS, Document, OpenWindow
from infinity.checkpoint.directory import find_tag, missing_latest_message
from infinity.checkpoint.durable_reader import DurableReader
from infinity.checkpoint.manifest import (
    BUFFERS,
    FROZEN,
    GRADIENT,
    BufferRecord,
    Manifest,
    ParameterRecord,
    TensorSpec,
)
from infinity.checkpoint.plain import MAX_ARRAY_BYTES, decode, encode
from infinity.checkpoint.ranges import RangeWriter
from infinity.checkpoint.reader import CheckpointReader, StateReader
from infinity.checkpoint.schemas import check_run_state
from infinity.checkpoint.streams import frozen_segment_offset, state_streams
from infinity.checkpoint.writer import CheckpointWriter, files_of, temporary_directory
from infinity.common.crc32c import crc32c_of
from infinity.common.sizes import format_size
from infinity.config.schema import Config
from infinity.distributed.compare import check_equal
from infinity.errors import (
    CheckpointError,
    ConfigError,
    EngineFailedError,
    InfinityError,
    InfinityWarning,
    listed,
)
from infinity.model.buffers import Buffer, check_buffers, find_buffers, restore_buffers
from infinity.model.extra_state import (
    capture_extra_state,
    check_extra_state,
    restore_extra_state,
)
from infinity.model.safetensors_file import DTYPE_NAMES
from infinity.storage.run_dir import RECORD_NAME
from infinity.training.components import EngineComponents
from infinity.training.load_state import check_state, load_state
from infinity.training.optimizer_state import share_non_moment_state
from infinity.training.parameter_values import ParameterValues
from infinity.training.run_state import RunState
from infinity.training.step import StepRunner

_MAX_RANK_BUFFER_BYTES = 4 << 20  # bytes of one rank's buffers in the manifest


class IncompleteLoadError(EngineFailedError):
    """Failure of an engine whose load was incomplete; a later complete load clears it."""


@dataclass(frozen=True)
class LoadSelection:
    """Selection of the state to load from a checkpoint; weights and buffers always are."""

    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    strict: bool = True


class Checkpoints:
    """Saving and loading of one engine's state; used by the training thread."""

    def __init__(
        self,
        module: nn.Module,
        components: EngineComponents,
        step_runner: StepRunner,
        values: ParameterValues,
        run_state: RunState,
        index_of: Mapping[int, int],
        rule: str,
        config: Config,
    ) -> None:
        self._window = components.window
        self.run_state = run_state
        self._module = module
        self._components = components
        self._plan = components.plan
        self._store = components.store
        self._gradients = components.gradients
        self._failure = components.failure
        self._ranks = components.ranks
        self._saver = components.saver
        self._step_runner = step_runner
        self._values = values
        self._index_of = index_of
        self._rule = rule
        self._config = {name: entry["value"] for name, entry in config.resolved().items()}
        # By parameter of the model; for a split stack of experts, the segment of its first rows.
        self._segments = {
            s.origin: s for u in components.plan.units for s in u.segments if s.begins
        }
        self._origins = {s.parameter: s.origin for u in components.plan.units for s in u.segments}
        self._has_ranges = any(unit.is_range for unit in components.plan.units)

    # --- saving ------------------------------------------------------------------------------

    def save(
        self,
        root: Path,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        save_latest: bool,
        keep_last: int | None,
        wait: bool,
    ) -> Path:
        """Implement `Engine.save_checkpoint`."""
        ranks = self._ranks
        self._saver.finish()
        tag = tag if tag is not None else f"global_step{self._step_runner.counters.steps}"
        check_equal(ranks, "the checkpoint to save", {"tag": tag})
        with ranks.propagate_errors("saves a checkpoint"):
            self._values.check_none_materialized("a checkpoint cannot be saved")
            self._wait_until_stored()
        gradients = sorted({self._origins[i] for i in self._gradients.arrived()})
        buffers = self._saved_buffers()
        streams = state_streams(self._plan)
        if gradients:
            dtype = self._gradients.dtype
            streams[GRADIENT] = [
                TensorSpec(self._segments[i].name, self._segments[i].full_shape, dtype)
                for i in gradients
            ]
        with ranks.propagate_errors("saves a checkpoint"):
            manifest = self._manifest(client_state, buffers)
        if buffers:
            streams[BUFFERS] = [record.spec for record in manifest.buffers]
        writer, ranges = None, None
        by_ranges = ranks.count > 1 or self._has_ranges  # bytes are not produced in file order
        files = {n: f for n, f in files_of(streams).items() if n not in (BUFFERS, GRADIENT)}
        try:
            previous = self._saver.frozen.begin()
            with ranks.collective_section("saves a checkpoint"):
                if ranks.rank == 0:
                    writer = CheckpointWriter(root, tag, streams, before=previous, same=(FROZEN,))
                    if by_ranges:
                        writer.create_sparse_files(
                            name for name in files if not writer.shares(name)
                        )
                for buffer in buffers:
                    _write(writer, BUFFERS, buffer.value)
                for index in gradients:
                    _write(writer, GRADIENT, self._gradients.read(index))
            if by_ranges:
                shared = writer is not None and writer.shares(FROZEN)
                if ranks.synchronize("shares frozen files", shared)[0][0]:
                    del files[FROZEN]
                with ranks.collective_section("opens a checkpoint's files"):
                    ranges = RangeWriter(temporary_directory(root, tag), files)

            def publish(writer: CheckpointWriter) -> Path:
                return writer.finish(manifest, save_latest=save_latest, keep_last=keep_last)

            self._saver.start(writer, ranges, publish)
        except BaseException:
            for output in (writer, ranges):
                if output is not None and not self._saver.busy:
                    output.abort()
            raise
        if wait:
            self._saver.finish()
        return root / tag

    def _manifest(self, client_state: Mapping[str, Any], buffers: Sequence[Buffer]) -> Manifest:
        plan, steps = self._plan, self._step_runner.steps
        names: dict[int, list[str]] = {}  # in `state_dict()`; a tied parameter has several
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(self._index_of[id(parameter)], []).append(name)
        parameters = [
            ParameterRecord(
                s.name,
                tuple(name for name in names[s.origin] if name != s.name),
                s.full_shape,
                s.dtype,
                s.trained,
                steps[s.parameter],
                s.form,
            )
            for unit in plan.units
            for s in unit.segments
            if s.begins
        ]
        return Manifest(
            engine_version=version("torch-infinity"),
            global_steps=self._step_runner.counters.steps,
            precision=plan.precision.name,
            rule=self._rule,
            moments=tuple(m.value for m in plan.precision.moments),
            parameters=tuple(parameters),
            buffers=tuple(
                BufferRecord.of(b.names, b.value, persistent=b.persistent) for b in buffers
            ),
            run=self._encode_run(buffers),
            client_state=encode(dict(client_state), "client_state"),
            config=dict(self._config),
            plan={
                "micro_batches": self._window.length,
                "ranks": plan.ranks,
                "text": plan.describe().splitlines(),
            },
        )

    def _encode_run(self, buffers: Sequence[Buffer]) -> Any:
        """Return the run's state as JSON; with several ranks, including that of each rank.

        The state of a rank includes its buffers that differ from rank 0's, which the checkpoint
        stores.
        """
        ranks = self._ranks
        share_non_moment_state(self._store, self._components.updater, self._origins.keys())
        state = self._capture_run()
        if ranks.count > 1:
            local_state = {name: state[name] for name in PER_RANK_KEYS}
            local_state["buffers"] = self._differing_buffers(buffers)
            with ranks.collective_section("saves a checkpoint"):
                encoded = encode(local_state, "the run's state")
            state["ranks"] = [decode(data) for data in ranks.all_gather_object(encoded)]
        return encode(state, "the run's state")

    def _capture_run(self) -> dict[str, Any]:
        return {**self.run_state.capture(), "extra_state": capture_extra_state(self._module)}

    def _differing_buffers(self, buffers: Sequence[Buffer]) -> dict[str, Tensor]:
        """Return persistent buffers that differ from rank 0's; warn and return {} if too large."""
        candidates = [b for b in buffers if b.persistent and type(b.value) is Tensor]
        values = {b.names[0]: b.value.detach().cpu().contiguous() for b in candidates}
        sums = {n: crc32c_of(v) for n, v in values.items()}
        self._ranks.synchronize("saves a checkpoint")
        rank0_sums = self._ranks.all_gather_object(sums)[0]
        differing = {n: v for n, v in values.items() if rank0_sums.get(n) != sums[n]}
        if sum(v.nbytes for v in differing.values()) <= _MAX_RANK_BUFFER_BYTES:
            return differing
        warnings.warn(
            f"{listed(list(differing), 3)} are not the first rank's, and take more than "
            f"{format_size(_MAX_RANK_BUFFER_BYTES)}: the checkpoint has the first rank's only, as "
            "a run that goes on from there will",
            InfinityWarning,
            stacklevel=6,
        )
        return {}

    # --- loading -----------------------------------------------------------------------------

    def load(
        self, root: Path, tag: str | None, wanted: LoadSelection
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Implement `Engine.load_checkpoint`."""
        failure, ranks = self._failure, self._ranks
        with ranks.propagate_errors("loads a checkpoint"):
            failure.check(besides=IncompleteLoadError)
            self._saver.finish()
            self._values.check_none_materialized("a checkpoint cannot be loaded")
        is_run = tag is None and (root / RECORD_NAME).is_file()  # the directory of a durable run
        with ranks.propagate_errors("loads a checkpoint"):
            found_tag = "" if is_run else find_tag(root, tag)
        check_equal(ranks, "the checkpoint to load", {"tag": found_tag})
        if found_tag is None:
            if ranks.rank == 0:
                message = f"nothing was loaded: {missing_latest_message(root)}"
                warnings.warn(message, InfinityWarning, stacklevel=3)
            return None, None
        with (
            ranks.propagate_errors("loads a checkpoint"),
            DurableReader(root) if is_run else CheckpointReader(root, found_tag) as reader,
        ):
            client_state = decode(reader.manifest.client_state)
            run = decode(reader.manifest.run)
            check_run_state(run, f"the run's state in {reader.directory}")
            if not isinstance(client_state, dict):
                raise CheckpointError(
                    f"client_state in {reader.directory} is {client_state!r:.60}, no dict"
                )
            if ranks.count > 1:
                content = json.dumps([reader.manifest.run, reader.manifest.plan]).encode()
                facts = {"updates": reader.manifest.global_steps, "run": zlib.crc32(content)}
                check_equal(ranks, "the checkpoint", facts)
            if rank_states := run.pop("ranks", None):
                run |= rank_states[ranks.rank % len(rank_states)]
            full = wanted.optimizer and not wanted.module_only
            self._check(reader, run, wanted, full=full)
            failure.clear_failure(IncompleteLoadError)
            try:
                with ranks.collective_section("loads a checkpoint"):
                    self._replace(reader, wanted, run.get("buffers", {}), full=full)
                    self._restore(reader, run, wanted)
                self._commit(reader)
            except BaseException:
                failure.note(
                    IncompleteLoadError(
                        f"loading {reader.directory} did not end well: the engine holds half of it",
                        remedy="load another checkpoint",
                    )
                )
                raise
        return str(root / found_tag), client_state

    def _restore(self, reader: StateReader, run: dict[str, Any], wanted: LoadSelection) -> None:
        restore_extra_state(self._module, run.get("extra_state", {}))
        if wanted.module_only:
            return
        if not run:  # converted from another format
            manifest = reader.manifest
            steps = {p.name: p.step for p in manifest.parameters} if wanted.optimizer else {}
            self.run_state.adopt(manifest.global_steps, steps)
            return
        self.run_state.restore(run, optimizer=wanted.optimizer, scheduler=wanted.scheduler)

    def _commit(self, reader: StateReader) -> None:
        """Commit the loaded state if the run is durable."""
        durability, steps = self._components.durability, self._step_runner.counters.global_steps
        if durability is None:
            return
        window = None
        if self._window.is_open:
            assert isinstance(reader, CheckpointReader)  # `_check_window` refuses others
            directory = reader.directory
            window = OpenWindow(str(directory.parent), directory.name, reader.manifest_crc32c)
        try:
            durability.commit(self.document(window), steps)
        except BaseException as error:
            # It is unknown which state is committed: neither may be overwritten.
            self._failure.fail(error)
            raise

    def _replace(
        self,
        reader: StateReader,
        wanted: LoadSelection,
        local_buffers: dict[str, Tensor],
        *,
        full: bool,
    ) -> None:
        """Replace the engine's state; `local_buffers` are those that differ from rank 0's."""
        self._wait_until_stored()
        self._window.clear()
        self._gradients.reset()
        if full:
            prefetcher = self._components.prefetcher
            for layout in self._plan.units:
                prefetcher.drop(layout.index)
            load_state(reader, self._plan, self._store)
            for layout in self._plan.units:
                prefetcher.ledger.record_edit(layout.index)
            self._load_gradients(reader)
        else:
            self._load_weights(reader)
        values = {n: reader.read(BUFFERS, n) for n in reader.names(BUFFERS)} | local_buffers
        restore_buffers(self._module, values, persistent_only=wanted.module_only)

    def _check(
        self, reader: StateReader, run: dict[str, Any], wanted: LoadSelection, *, full: bool
    ) -> None:
        if full:
            check_state(reader, self._plan, self._rule)
            self._check_window(reader)
        else:
            self._check_weights(reader, strict=wanted.strict)
        shapes = {n: reader.facts(BUFFERS, n).shape for n in reader.names(BUFFERS)}
        persistent = [(b.name, *b.aliases) for b in reader.manifest.buffers if b.persistent]
        check_buffers(self._module, shapes, persistent, strict=wanted.strict)
        if wanted.strict and "extra_state" in run:  # not in checkpoints of earlier versions
            check_extra_state(self._module, run["extra_state"])
        if run and not wanted.module_only:
            self.run_state.check(run, optimizer=wanted.optimizer, scheduler=wanted.scheduler)

    def _check_window(self, reader: StateReader) -> None:
        if isinstance(reader, DurableReader) and (window := reader.document.window) is not None:
            raise CheckpointError(
                f"the last commit of {reader.directory} is within an accumulation window",
                because="its gradients are those of a checkpoint that was loaded",
                remedy=f"load_checkpoint({window.root!r}, {window.tag!r})",
            )
        if not reader.names(GRADIENT):
            return
        saved_plan = reader.manifest.plan if isinstance(reader.manifest.plan, dict) else {}
        saved_length, length = saved_plan.get("micro_batches"), self._window.length
        saved_ranks, ranks = saved_plan.get("ranks", 1), self._window.ranks
        if (saved_length, saved_ranks) != (length, ranks):
            raise CheckpointError(
                f"{reader.directory} was saved within an accumulation window of {saved_length} "
                f"micro-batches on {saved_ranks} ranks; this engine has {length} on {ranks}",
                remedy=f"gradient_accumulation_steps: {saved_length} with {saved_ranks} ranks, or "
                "load_checkpoint(..., load_optimizer_states=False)",
            )

    def _check_weights(self, reader: StateReader, *, strict: bool) -> None:
        records = {p.name: p for p in reader.manifest.parameters}
        problems = []
        for segment in self._segments.values():
            record = records.pop(segment.name, None)
            if record is None:
                problems += [f"{segment.name!r} is missing"] if strict else []
            elif tuple(record.shape) != segment.full_shape:
                problems.append(
                    f"{segment.name!r} has shape {tuple(record.shape)}, not {segment.full_shape}"
                )
        problems += [f"{name!r} is not in the model" for name in records] if strict else []
        if problems:
            raise CheckpointError(
                f"{reader.directory} does not fit the model: {listed(problems, separator='; ')}",
                remedy="load_module_strict=False ignores missing and unexpected names"
                if strict
                else None,
            )

    def _load_weights(self, reader: StateReader) -> None:
        saved_names = {p.name for p in reader.manifest.parameters}
        for index in sorted(self._segments, key=self._values.sort_key):
            name, form = self._segments[index].name, self._segments[index].form
            if form and name in reader.quantized and reader.quantized[name].form == form:
                # Copy the packed bytes: values would be rounded a second time.
                for row_parameter, _ in self._values.rows(index):
                    segment = self._values.location_of(row_parameter)[1]
                    packed = torch.zeros(segment.nbytes, dtype=torch.uint8, device="cpu")
                    reader.read_into(FROZEN, segment.name, frozen_segment_offset(segment), packed)
                    self._values.write_packed(row_parameter, packed)
            elif name in saved_names:
                self._values.write(index, reader.master(name))
        self._values.flush()

    def _load_gradients(self, reader: StateReader) -> None:
        index_of = {s.name: i for i, s in self._segments.items()}
        for name in reader.names(GRADIENT):
            value = reader.read(GRADIENT, name)
            for row_parameter, rows in self._values.rows(index_of[name]):
                self._gradients.put(row_parameter, value[rows])
        self._gradients.finish()

    # --- durable steps -----------------------------------------------------------------------

    def document(self, window: OpenWindow | None = None) -> Mapping[str, Any]:
        """Return the data that a commit adds to the stored state; see `checkpoint/commits.py`."""
        buffers = [b for b in find_buffers(self._module) if b.persistent or not _is_large(b)]
        return Document(
            run=self._capture_run(),
            buffers={b.names[0]: b.value.detach().cpu() for b in buffers},
            persistent=frozenset(b.names[0] for b in buffers if b.persistent),
            window=window,
        ).to_json()

    def _saved_buffers(self) -> list[Buffer]:
        """Return the buffers that a checkpoint can store; raise if another one is persistent."""
        buffers = []
        for buffer in find_buffers(self._module):
            value = buffer.value
            if value.layout is torch.strided and value.dtype in DTYPE_NAMES:
                buffers.append(buffer)
            elif buffer.persistent:
                raise ConfigError(
                    f"the buffer {buffer.names[0]!r} cannot be saved: it is of {value.dtype}, "
                    f"{value.layout}, which safetensors files do not hold",
                    remedy="register_buffer(..., persistent=False), or register_state(name, ...)",
                )
        return buffers

    def restore_document(self, document: Mapping[str, Any]) -> None:
        """Restore the state of a committed step. Raises `CheckpointError`."""
        data = Document.from_json(document)
        self.run_state.check(data.run, optimizer=True, scheduler=True)
        if data.window is not None:
            with _open_checkpoint(data.window) as reader:
                self._check_window(reader)
                self._load_gradients(reader)
        restore_buffers(self._module, data.buffers)
        restore_extra_state(self._module, data.run.get("extra_state", {}))
        self.run_state.restore(data.run)
        self.run_state.resumed()

    # --- saving and loading ------------------------------------------------------------------

    def _wait_until_stored(self) -> None:
        """Wait until no update is pending and all state is stored; release materialized values."""
        self._values.release_all_materialized()
        self._gradients.finish()
        self._gradients.settle()
        self._values.finish_updates()
        for layout in self._plan.units:
            self._store.wait_writes(layout.index)


def _write(writer: CheckpointWriter | None, stream: str, value: Tensor) -> None:
    """Write the bytes of a tensor; do nothing without a writer, as on ranks other than 0."""
    if writer is not None:
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        writer.write(stream, data.view(-1).view(torch.uint8))


def check_buffer_sizes(module: nn.Module) -> None:
    """Raise `ConfigError` for a buffer that is too large for a commit."""
    for buffer in find_buffers(module):
        if buffer.persistent and _is_large(buffer):
            raise ConfigError(
                f"durable: the buffer {buffer.names[0]!r} has {format_size(buffer.value.nbytes)}, "
                f"more than {format_size(MAX_ARRAY_BYTES)}",
                because="every commit holds all buffers, but those that are not persistent",
                remedy="register_buffer(..., persistent=False), if the model's code makes it; or "
                "a frozen parameter",
            )


def _is_large(buffer: Buffer) -> bool:
    return buffer.value.nbytes > MAX_ARRAY_BYTES


def _open_checkpoint(window: OpenWindow) -> CheckpointReader:
    """Open the checkpoint of an open window; raise `CheckpointError` if it was replaced."""
    root = Path(window.root)
    try:
        reader = CheckpointReader(root, window.tag)
        if reader.manifest_crc32c == window.manifest_crc32c:
            return reader
        reader.close()
        why = "another checkpoint has that name now"
    except InfinityError as error:
        why = error.what
    raise CheckpointError(
        f"the committed state is that of {root / window.tag}, which was loaded within an "
        f"accumulation window; the gradients of that window cannot be read from there: {why}",
        because="no step was committed since",
        remedy="bring that checkpoint back; or start with resume: never, and load another",
    )
