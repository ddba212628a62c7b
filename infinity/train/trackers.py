"""Trackers of a run: TensorBoard, W&B, MLflow and others, through accelerate.

A tracker that is not installed is refused before a run begins. Later failures do not end a run: a
tracker that fails is reported once and not used again; `metrics.jsonl` has the numbers.
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
_MODULES = {"tensorboard": ("torch.utils.tensorboard", "tensorboardX")}  # of others: their names


def check_trackers(names: Sequence[str]) -> None:
    """Raise `MachineError` for a tracker whose package is not installed."""
    for name in names:
        first_error: ImportError | None = None
        for module in _MODULES.get(name, (name,)):
            try:
                importlib.import_module(module)
                break
            except ImportError as error:
                first_error = first_error or error
        else:
            raise MachineError(
                f"training.report_to: {name} cannot be imported",
                because=first_lines(first_error) if first_error else None,
                remedy=f"pip install {name.replace('_', '-')}; or leave it out: metrics.jsonl has "
                "the same numbers",
            )


class Trackers:
    """Started trackers of `names`; one that cannot be started is reported and omitted.

    `directory` is that of the run, `identity` an id that stays when it is resumed, `after` the step
    that it resumes from, and `settings` its settings, by name.
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
        self._trackers: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": after + 1 if after else None},
            "wandb": {"id": identity, "resume": "allow", "name": directory.name,
                      "dir": os.fspath(directory)},
            "mlflow": {"run_name": f"{directory.name}-{identity}"},
        }  # fmt: skip
        for name in names:
            try:
                self._start(name, directory, options.get(name, {}), dict(settings or {}))
            except Exception as error:
                _warn(name, "did not start", error, f"maybe: pip install {name}")

    def _start(
        self, name: str, directory: Path, options: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        tracking: Any = importlib.import_module("accelerate.tracking")
        importlib.import_module("accelerate").PartialState()  # required by its logger
        tracker_type = tracking.LOGGER_TYPE_TO_CLASS[name]
        is_tensorboard = name == "tensorboard"  # its name is that of its directory
        directories = (
            {"logging_dir": os.fspath(directory)} if tracker_type.requires_logging_directory else {}
        )
        tracker = tracker_type(name if is_tensorboard else PROJECT, **directories, **options)
        if hasattr(tracker, "start"):  # in older releases the constructor does
            tracker.start()
        self._trackers[name] = tracker
        if not is_tensorboard:  # TensorBoard's would write them to another directory
            tracker.store_init_configuration(settings)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the numbers of a step."""
        self._for_each(lambda tracker: tracker.log(dict(values), step=step))

    def close(self) -> None:
        """Flush and close the trackers; idempotent."""
        self._for_each(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _for_each(self, call: Callable[[Any], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._trackers[name]
                _warn(name, "failed", error, "it is not used any more")


def _warn(name: str, problem: str, error: Exception, consequence: str) -> None:
    message = f"training.report_to: {name} {problem} ({first_lines(error)}); {consequence}"
    warnings.warn(f"{message}; metrics.jsonl has the numbers", InfinityWarning)
