"""What a run tells while it goes: `metrics.jsonl`, and TensorBoard's files if asked for.

`metrics.jsonl` has one object a line. "event": "step" with step, epoch, tokens (all so far), loss,
lr, grad_norm, clip_factor, skipped, step_s, tokens_per_s, stall_s and moved (by lane), memory;
"event": "evaluation" with step, loss, perplexity, windows; "event": "not saved" with step, tag and
why, for a checkpoint that failed.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from infinity.errors import MachineError
from infinity.stable import atomic_write, json_lines

_CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "epoch")


class LastStep:
    """What is known of a step before it is committed, kept with the commit: see `Metrics.catch_up`.

    A state for `engine.register_state`; `record` is a line of `metrics.jsonl`, empty before any.
    Its "loss" may be a tensor, which is read only when somebody asks.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The record."""
        return {k: v.item() if isinstance(v, Tensor) else v for k, v in self.record.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.record = dict(state)


class Metrics:
    """Appends records; of a run that goes on, those that it will write again are moved aside."""

    def __init__(self, path: Path, *, after: int, tensorboard: Path | None = None) -> None:
        """`after` is the step that the run goes on from; 0 for a new one. Raises `MachineError`."""
        self._path = path
        self.evaluated: set[int] = set()
        """Steps with an evaluation."""
        self.notes: list[str] = []
        """What has to be said once."""
        self.last_step = 0
        """The last step that was told, of those that are behind the run."""
        self._before_line = b""
        kept, told = self._kept(after)
        try:
            if told > after:
                asides = (path.with_suffix(f".{number}.jsonl") for number in count(1))
                aside = next(p for p in asides if not p.exists())
                with atomic_write(aside) as file:
                    file.write(path.read_bytes())
                self.notes.append(
                    f"{path.name} told of steps up to {told}, and the run goes on from {after}: "
                    f"what it was is in {aside.name}"
                )
            with atomic_write(path) as file:
                file.write("".join(kept).encode())
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from error
        self._board = None if tensorboard is None else self._open_board(tensorboard, after)

    def close(self) -> None:
        """Close the files; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._board is not None:
            self._board.close()
            self._board = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, which has "event" and "step". Raises `MachineError`."""
        line = json.dumps({key: _plain(value) for key, value in record.items()}) + "\n"
        data = self._before_line + line.encode()
        try:
            written = os.write(self._file, data)
            # What a full disk cuts off ends there: the next line must not be lost as well.
            self._before_line = b"" if written == len(data) else b"\n"
            if self._before_line:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._refused(error) from error
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])
        if self._board is not None:
            self._show(self._board, record)

    def catch_up(self, last: LastStep) -> None:
        """Tell of a step that was committed before it could be told. Raises `MachineError`."""
        if last.record and last.record["step"] > self.last_step:
            self.write({**last.record, "recovered": True})

    def _kept(self, after: int) -> tuple[list[str], int]:
        """Lines of steps that are behind the run, and the last step that any line tells of."""
        kept, told = [], 0
        try:
            for line, record in _lines(self._path):
                is_step = record["event"] == "step"
                told = max(told, record["step"] * is_step)
                if record["step"] <= after:
                    kept.append(line)
                    self.last_step = max(self.last_step, record["step"] * is_step)
                    if record["event"] == "evaluation":
                        self.evaluated.add(record["step"])
        except OSError as error:
            raise self._refused(error) from error
        return kept, told

    def _open_board(self, directory: Path, after: int) -> Any:
        try:
            library = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            self.notes.append(
                "training.tensorboard: the package is not installed (pip install tensorboard); "
                "metrics.jsonl has the numbers"
            )
            return None
        return library.SummaryWriter(os.fspath(directory), purge_step=after + 1 if after else None)

    @staticmethod
    def _show(board: Any, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if record["event"] == "evaluation":
            board.add_scalar("evaluation/loss", record["loss"], step)
            return
        for name in _CURVES:
            if isinstance(record.get(name), int | float):
                board.add_scalar(f"train/{name}", record[name], step)
        for group in ("stall_s", "moved"):
            for name, value in record.get(group, {}).items():
                board.add_scalar(f"{group}/{name}", value, step)

    def _refused(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._path} cannot be written: {error.strerror}",
            remedy="make room, or run_dir=... elsewhere; --resume auto goes on",
        )


def steps_told(path: Path) -> int:
    """The last step that a `metrics.jsonl` tells of; 0 where there is none."""
    with suppress(OSError):
        return max((r["step"] for _, r in _lines(path) if r["event"] == "step"), default=0)
    return 0


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines and what they say, none where there is no file; a kill may have torn the last.

    Raises `OSError`.
    """
    for line, record in json_lines(path):
        if line.endswith("\n") and isinstance(record.get("step"), int):
            yield line, {"event": None, **record}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value
