"""What a run tells while it goes: `metrics.jsonl`, and TensorBoard's files if asked for.

`metrics.jsonl` has one object a line. "event": "step" with step, epoch, tokens (all so far), loss,
lr, grad_norm, clip_factor, skipped, step_s, tokens_per_s, stall_s and moved (by lane), memory;
"event": "evaluation" with step, loss, perplexity, windows.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.errors import MachineError

_CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "epoch")


class Metrics:
    """Appends records; a run that goes on first drops those that it will write again."""

    def __init__(self, path: Path, *, after: int, tensorboard: Path | None = None) -> None:
        """`after` is the step that the run goes on from; 0 for a new one. Raises `MachineError`."""
        self._path = path
        self.evaluated: set[int] = set()
        """Steps with an evaluation."""
        self.notes: list[str] = []
        """What has to be said once."""
        kept = self._kept(after)
        try:
            partial = path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
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
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            raise self._refused(error) from error
        if record["event"] == "evaluation":
            self.evaluated.add(record["step"])
        if self._board is not None:
            self._show(self._board, record)

    def _kept(self, after: int) -> list[str]:
        """Whole lines of steps that are behind the run; a kill may have torn the last one."""
        kept = []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refused(error) from error
        for line in lines:
            try:
                record = json.loads(line)
                if record["step"] > after or not line.endswith("\n"):
                    continue
            except (ValueError, KeyError, TypeError):
                continue
            kept.append(line)
            if record.get("event") == "evaluation":
                self.evaluated.add(record["step"])
        return kept

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


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value
