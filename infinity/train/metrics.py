"""Metrics of a run: callbacks, `metrics.jsonl`, and optional trackers.

`metrics.jsonl` has one JSON object per line, with "step" and one of these values of "event":
"step", with epoch, tokens (in total), loss, lr, grad_norm, clip_factor, skipped, step_s,
tokens_per_s, stall_s and moved (by direction), memory, and for mixtures of experts expert_load and
router_loss (see `StepReport`); "evaluation", with loss, perplexity, windows; "not saved", with tag
and why, for a failed checkpoint; "sample", with prompt and text. Each start writes "began", with
time (seconds since 1970), command, versions, device and host, and at its end, unless it is killed,
"ended", with time, why (None, or the error) and stopped_early.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from infinity._version import __version__
from infinity.common.accelerators import is_accelerator, name_of
from infinity.common.files import atomic_write, check_linked, json_lines
from infinity.errors import MachineError, first_lines
from infinity.plan.machine import cpu_model
from infinity.profiling.step_log import to_line
from infinity.train.trackers import Trackers

_TRACKED = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "epoch")


@dataclass(frozen=True)
class Result:
    """Result of a run; losses are in nats per token, None if not computed.

    `stopped` is True if a stop was requested before the last step, `stopped_by` the number of the
    signal that requested it on any rank, 0 for none. `checkpoint` is the one to resume from, None
    if that is a durable state; `model` the directory of the exported model. `failed_saves` counts
    failed saves of checkpoints. `best` is the smallest held-out loss, `best_step` its step, and
    `best_model` the directory of the best weights if they were saved. `stopped_early` is True if
    the held-out loss did not improve for `training.early_stop` evaluations.
    """

    steps: int
    num_steps: int
    stopped: bool
    loss: float | None
    evaluation_before: float | None
    evaluation: float | None
    tokens: int
    checkpoint: Path | None
    model: Path | None
    failed_saves: int = 0
    best: float | None = None
    best_step: int | None = None
    best_model: Path | None = None
    stopped_early: bool = False
    stopped_by: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with paths as strings."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}


class TrainCallback(Protocol):
    """Interface of a display of a run."""

    def begin(self, done: int, num_steps: int) -> None:
        """Begin training, after `done` steps."""

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Display a record of `metrics.jsonl`; that of a step has also `num_steps` and `left_s`."""

    def note(self, text: str) -> None:
        """Display a message."""

    @property
    def stopping(self) -> int:
        """Number of the signal that requested to stop after this step and save, or 0."""


class LastStep:
    """Record of the last step, set before it is committed and committed with it.

    A state for `engine.register_state`, for `Metrics.catch_up`. `record` is a line of
    `metrics.jsonl`, empty before the first step. Its "loss" may be a tensor, copied to the host
    only by `state_dict`.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the record with plain numbers."""
        return {k: v.item() if isinstance(v, Tensor) else v for k, v in self.record.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a record; raise `ValueError` if it is not that of a step."""
        if state and type(state.get("step")) is not int:
            raise ValueError(f"its step is {state.get('step')!r}")
        self.record = dict(state)


class Metrics:
    """Writer of `metrics.jsonl` and of trackers.

    When a run is resumed, records of later steps are removed from the file, after a copy of it.
    `evaluated` are the steps with an evaluation, `notes` messages for the user, `last_step` is the
    last recorded step, and `stopped_early` is written to the final record.
    """

    stopped_early = False

    def __init__(
        self,
        path: Path,
        *,
        after: int,
        trackers: Trackers | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the file, without records of steps beyond `after`, 0 for a new run.

        With `facts`, write that the run began, and at the exit of the context that it ended. Raises
        `MachineError`.
        """
        self._path = path
        self.notes: list[str] = []
        self._line_prefix = b""
        self._trackers = trackers
        try:
            records = list(_lines(path))
            retained = [(line, record) for line, record in records if record["step"] <= after]
            recorded = _last_step(record for _, record in records)
            if recorded > after:
                backups = (path.with_suffix(f".{number}.jsonl") for number in count(1))
                backup = next(p for p in backups if not p.exists())
                with atomic_write(backup) as file:
                    file.write(path.read_bytes())
                self.notes.append(
                    f"{path.name} has steps up to {recorded}, and the run goes on from {after}: "
                    f"the old lines are in {backup.name}"
                )
            with atomic_write(path) as file:
                file.write("".join(line for line, _ in retained).encode())
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._write_error(error) from error
        self.last_step = _last_step(record for _, record in retained)
        self.evaluated = {r["step"] for _, r in retained if r["event"] == "evaluation"}
        self._writes_lifecycle = facts is not None
        if facts is not None:
            self._write_lifecycle("began", after, **facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._writes_lifecycle:
            stopped = isinstance(error, KeyboardInterrupt)
            why = "it was stopped in a step" if stopped else error and first_lines(error)
            self._write_lifecycle(
                "ended", self.last_step, why=why, stopped_early=self.stopped_early
            )
        self.close()

    def _write_lifecycle(self, event: str, step: int, **facts: Any) -> None:
        """Write a record of the start or the end; ignore `MachineError`."""
        with suppress(MachineError):
            self.write({"event": event, "step": step, "time": time.time(), **facts})

    def close(self) -> None:
        """Close the files; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._trackers is not None:
            self._trackers.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, which has "event" and "step".

        Raises `RemovedError` if the file was unlinked, and other `MachineError`.
        """
        line = to_line(record)
        data = self._line_prefix + line.encode()
        try:
            written = os.write(self._file, data)
            # End a line that a full disk has truncated before the next one is written.
            self._line_prefix = b"" if written == len(data) else b"\n"
            if self._line_prefix:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            check_linked(self._file, self._path)
        except OSError as error:
            raise self._write_error(error) from error
        tracked: dict[str, Any] = {}
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])
            tracked["evaluation/loss"] = record["loss"]
        elif record["event"] == "step":
            self.last_step = record["step"]
            tracked |= {f"train/{name}": record[name] for name in _TRACKED if name in record}
            for group in ("stall_s", "moved", "memory"):
                tracked |= {f"{group}/{name}": v for name, v in record.get(group, {}).items()}
        if self._trackers is not None and tracked:
            self._trackers.log(tracked, record["step"])

    def catch_up(self, last: LastStep) -> None:
        """Write the record of a committed step that the file lacks."""
        if last.record and last.record["step"] > self.last_step:
            self.write({**last.record, "recovered": True})

    def _write_error(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._path} cannot be written: {error.strerror}",
            remedy="free space, or run_dir=... elsewhere; --resume auto goes on",
        )


class NullMetrics(Metrics):
    """Metrics of ranks that do not write."""

    def __init__(self, evaluated: Iterable[int]) -> None:
        self.evaluated, self.notes, self.last_step = set(evaluated), [], 0
        self._writes_lifecycle = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Remember the steps of evaluations."""
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])

    def catch_up(self, last: LastStep) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def recorded_steps(path: Path) -> int:
    """Return the last step in a `metrics.jsonl`; 0 if there is none."""
    with suppress(OSError):
        return _last_step(record for _, record in _lines(path))
    return 0


def environment(device: torch.device) -> dict[str, Any]:
    """Return the names of device and host, and the versions of packages and of CUDA."""
    versions = {"infinity": __version__, "torch": torch.__version__}
    versions["Python"] = platform.python_version()
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    name = name_of(device) if is_accelerator(device) else cpu_model()
    return {"device": name, "host": platform.node(), "versions": versions}


def _last_step(records: Iterator[dict[str, Any]]) -> int:
    return max((r["step"] for r in records if r["event"] == "step"), default=0)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield complete lines and their records, none if there is no file.

    A kill may have truncated the last line. Raises `OSError`.
    """
    for line, record in json_lines(path):
        if line.endswith("\n") and isinstance(record.get("step"), int):
            yield line, {"event": None, **record}
