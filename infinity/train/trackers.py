"""Trackers of a run: TensorBoard, W&B, MLflow, and those of accelerate.

They are accelerate's, which knows how each is spoken to. One that is not installed is refused
before a run begins. Later none is a reason for a run to end: one that fails is named once and asked
no more; `metrics.jsonl` has the numbers.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import InfinityWarning, MachineError, first_lines

PROJECT = "infinity"  # W&B's project, MLflow's experiment
_MODULES = {"tensorboard": ("torch.utils.tensorboard", "tensorboardX")}  # others: their own names


def check_trackers(names: Sequence[str]) -> None:
    """Raise `MachineError` for a tracker whose package is not installed."""
    for name in names:
        failed: ImportError | None = None
        for module in _MODULES.get(name, (name,)):
            try:
                importlib.import_module(module)
                break
            except ImportError as error:
                failed = failed or error
        else:
            raise MachineError(
                f"training.report_to: {name} cannot be imported",
                because=first_lines(failed) if failed else None,
                remedy=f"pip install {name.replace('_', '-')}; or leave it out: metrics.jsonl has "
                "the same numbers",
            )


class Trackers:
    """The trackers of `names`; one that cannot be started is reported, and left out.

    `directory` is the run's, `identity` the same whenever it goes on, `after` the step it does so
    from, `settings` what it was told.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        *,
        identity: str,
        after: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._open: dict[str, Any] = {}
        more: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": after + 1 if after else None},
            "wandb": {"id": identity, "resume": "allow", "name": directory.name,
                      "dir": os.fspath(directory)},
            "mlflow": {"run_name": f"{directory.name}-{identity}"},
        }  # fmt: skip
        for name in names:
            try:
                self._begin(name, directory, more.get(name, {}), dict(settings or {}))
            except Exception as error:
                _report(name, "did not start", error, f"maybe: pip install {name}")

    def _begin(
        self, name: str, directory: Path, more: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        tracking: Any = importlib.import_module("accelerate.tracking")
        importlib.import_module("accelerate").PartialState()  # its logger asks for it
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        board = name == "tensorboard"  # in a directory of its own, which its name is
        where = {"logging_dir": os.fspath(directory)} if kind.requires_logging_directory else {}
        tracker = kind(name if board else PROJECT, **where, **more)
        if hasattr(tracker, "start"):  # older ones begin when they are made
            tracker.start()
        self._open[name] = tracker
        if not board:  # which would write them to a directory beside
            tracker.store_init_configuration(settings)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the numbers of a step."""
        self._each(lambda tracker: tracker.log(dict(values), step=step))

    def close(self) -> None:
        """Let them write what they have; idempotent."""
        self._each(lambda tracker: tracker.finish())
        self._open.clear()

    def _each(self, call: Callable[[Any], object]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._open[name]
                _report(name, "failed", error, "it is not used any more")


def _report(name: str, what: str, error: Exception, then: str) -> None:
    message = f"training.report_to: {name} {what} ({first_lines(error)}); {then}"
    warnings.warn(f"{message}; metrics.jsonl has the numbers", InfinityWarning)
