"""Metrics of a run: callbacks, `metrics.jsonl`, and trackers if asked for.

`metrics.jsonl` has one object a line. "event": "step" with step, epoch, tokens (all so far), loss,
lr, grad_norm, clip_factor, skipped, step_s, tokens_per_s, stall_s and moved (by direction), memory,
of mixtures of experts expert_load and router_loss (see `StepReport`);
"event": "evaluation" with step, loss, perplexity, windows; "event": "not saved" with step, tag and
why, for a checkpoint that failed; "event": "sample" with step, prompt and text. Each time that the
run is started it says "began" with step, time (seconds since 1970), the command, versions and what
it runs on, and "ended" with step, time, why (None, or the error) and stopped_early; a run that was
killed does not.
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

_CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "epoch")


@dataclass(frozen=True)
class Result:
    """Result of a run. Losses are in nats a token, None where none was computed.

    `stopped` says that it was asked to stop before its last step, `stopped_by` by which signal, on
    whichever rank; 0 by none. `checkpoint` is the one to go on
    from, None where that is a durable state on disk; `model` the directory for transformers.
    `failed_saves` counts checkpoints that could not be saved on the way. `best` is the smallest
    held-out loss and `best_step` its step; `best_model` the directory with weights that were kept.
    `stopped_early` says that nothing got better any more.
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
        """Plain data."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}


class TrainCallback(Protocol):
    """Implemented by displays of a run."""

    def begin(self, done: int, num_steps: int) -> None:
        """Training begins, behind `done` steps."""

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`; that of a step with `num_steps` and `left_s`, to the last."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    @property
    def stopping(self) -> int:
        """Whether to finish this step, save, and stop: the number of a signal that asked, or 0."""


class LastStep:
    """Facts of a step before it is committed, kept with the commit: see `Metrics.catch_up`.

    A state for `engine.register_state`; `record` is a line of `metrics.jsonl`, empty before any.
    Its "loss" may be a tensor, which is read only when somebody asks.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The record."""
        return {k: v.item() if isinstance(v, Tensor) else v for k, v in self.record.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; raises `ValueError` for a record that is not of a step."""
        if state and type(state.get("step")) is not int:
            raise ValueError(f"its step is {state.get('step')!r}")
        self.record = dict(state)


class Metrics:
    """Appends records; of a run that goes on, those that it will write again are moved aside.

    `evaluated` are the steps with an evaluation, `notes` what has to be said once, `last_step` is
    the last step that was told, of those that are behind the run; `stopped_early` is for the end.
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
        """`after` is the step that the run goes on from; 0 for a new one. Raises `MachineError`.

        With `facts` it says that the run began, and, used as a context, that it ended.
        """
        self._path = path
        self.notes: list[str] = []
        self._before_line = b""
        self._trackers = trackers
        try:
            found = list(_lines(path))
            kept = [(line, record) for line, record in found if record["step"] <= after]
            recorded = _last(record for _, record in found)
            if recorded > after:
                asides = (path.with_suffix(f".{number}.jsonl") for number in count(1))
                aside = next(p for p in asides if not p.exists())
                with atomic_write(aside) as file:
                    file.write(path.read_bytes())
                self.notes.append(
                    f"{path.name} has steps up to {recorded}, and the run goes on from {after}: "
                    f"the old lines are in {aside.name}"
                )
            with atomic_write(path) as file:
                file.write("".join(line for line, _ in kept).encode())
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from error
        self.last_step = _last(record for _, record in kept)
        self.evaluated = {r["step"] for _, r in kept if r["event"] == "evaluation"}
        self._began = facts is not None
        if facts is not None:
            self._mark("began", after, **facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._began:
            stopped = isinstance(error, KeyboardInterrupt)
            why = "it was stopped in a step" if stopped else error and first_lines(error)
            self._mark("ended", self.last_step, why=why, stopped_early=self.stopped_early)
        self.close()

    def _mark(self, event: str, step: int, **facts: Any) -> None:
        """Write an optional record; errors of a full drive are ignored."""
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

        Raises `MachineError`; of it `RemovedError` where the file has no name any more.
        """
        line = to_line(record)
        data = self._before_line + line.encode()
        try:
            written = os.write(self._file, data)
            # What a full disk cuts off ends there: the next line must not be lost as well.
            self._before_line = b"" if written == len(data) else b"\n"
            if self._before_line:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            check_linked(self._file, self._path)
        except OSError as error:
            raise self._refused(error) from error
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])
        if record["event"] == "step":
            self.last_step = record["step"]
        if self._trackers is not None and (values := dict(_curves(record))):
            self._trackers.log(values, record["step"])

    def catch_up(self, last: LastStep) -> None:
        """Write the record of a step that was committed before it was written."""
        if last.record and last.record["step"] > self.last_step:
            self.write({**last.record, "recovered": True})

    def _refused(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._path} cannot be written: {error.strerror}",
            remedy="make room, or run_dir=... elsewhere; --resume auto goes on",
        )


class Unwritten(Metrics):
    """Metrics of ranks that do not write."""

    def __init__(self, evaluated: Iterable[int]) -> None:
        self.evaluated, self.notes, self.last_step = set(evaluated), [], 0
        self._began = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Know of evaluations."""
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])

    def catch_up(self, last: LastStep) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Nothing to close."""


def recorded_steps(path: Path) -> int:
    """Return the last step in a `metrics.jsonl`; 0 without one."""
    with suppress(OSError):
        return _last(record for _, record in _lines(path))
    return 0


def environment(device: torch.device) -> dict[str, Any]:
    """Return the names of device and host, and versions by name; CUDA's if torch has it."""
    versions = {"infinity": __version__, "torch": torch.__version__}
    versions["Python"] = platform.python_version()
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    name = name_of(device) if is_accelerator(device) else cpu_model()
    return {"device": name, "host": platform.node(), "versions": versions}


def _last(records: Iterator[dict[str, Any]]) -> int:
    return max((r["step"] for r in records if r["event"] == "step"), default=0)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines and what they say, none where there is no file; a kill may have torn the last.

    Raises `OSError`.
    """
    for line, record in json_lines(path):
        if line.endswith("\n") and isinstance(record.get("step"), int):
            yield line, {"event": None, **record}


def _curves(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the values of a record that are drawn."""
    if record["event"] == "evaluation":
        yield "evaluation/loss", record["loss"]
    elif record["event"] == "step":
        yield from ((f"train/{name}", record[name]) for name in _CURVES if name in record)
        for group in ("stall_s", "moved", "memory"):
            yield from ((f"{group}/{name}", v) for name, v in record.get(group, {}).items())
