"""Monitors of a DeepSpeed configuration: TensorBoard, CSV files, Weights & Biases, and Comet."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from infinity.common.files import make_directories
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.processes import get_rank

Event = tuple[str, float, int]  # label such as Train/Samples/lr, value, samples so far
Section = Mapping[str, Any]


class _TensorBoard:
    """Event files in `output_path/job_name`."""

    def __init__(self, section: Section) -> None:
        library = _import_package("torch.utils.tensorboard", "tensorboard")
        self.summary_writer = library.SummaryWriter(log_dir=str(_directory(section)))

    def write(self, events: Sequence[Event]) -> None:
        for label, value, samples in events:
            self.summary_writer.add_scalar(label, value, samples)
        self.summary_writer.flush()

    def close(self) -> None:
        self.summary_writer.close()


class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, section: Section) -> None:
        self._library = _import_package("wandb", "wandb")
        self._library.init(
            project=section.get("project", "deepspeed"),
            group=section.get("group"),
            entity=section.get("team"),
        )

    def write(self, events: Sequence[Event]) -> None:
        for label, value, samples in events:
            self._library.log({label: value}, step=samples)

    def close(self) -> None:
        self._library.finish()


class _Csv:
    """CSV files in `output_path/job_name`: one per label, with a line `samples,value` per event.

    Label Train/Samples/lr goes to Train_Samples_lr.csv; existing files are appended to.
    """

    def __init__(self, section: Section) -> None:
        self._directory = _directory(section)
        make_directories(self._directory)

    def write(self, events: Sequence[Event]) -> None:
        for label, value, samples in events:
            name = label.replace("/", "_").replace(" ", "_")
            path = self._directory / f"{name}.csv"
            exists = path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not exists:
                    writer.writerow(["step", label.rpartition("/")[2]])
                writer.writerow([samples, value])

    def close(self) -> None:
        pass


class _Comet:
    """A Comet experiment; logs each label at most every `samples_log_interval` samples."""

    def __init__(self, section: Section) -> None:
        names = ("api_key", "workspace", "project", "experiment_key", "online", "mode")
        options = {name: section.get(name) for name in names}
        self._experiment = _import_package("comet_ml", "comet_ml").start(**options)
        if "experiment_name" in section:
            self._experiment.set_name(section["experiment_name"])
        self._interval = section.get("samples_log_interval", 100)
        self._last: dict[str, int] = {}  # label -> samples at its last metric

    def write(self, events: Sequence[Event]) -> None:
        for label, value, samples in events:
            if label not in self._last or samples - self._last[label] >= self._interval:
                self._last[label] = samples
                self._experiment.log_metric(label, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


_WRITERS: dict[str, Callable[[Section], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "csv_monitor": _Csv,
    "comet": _Comet,
}


def get_monitor_config(param_dict: Mapping[str, Any]) -> dict[str, Section]:
    """Return the monitor sections of a configuration, without keys that are null."""
    sections = {name: param_dict.get(name) or {} for name in _WRITERS}
    return {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in sections.items()
    }


class MonitorMaster:
    """All monitors that a configuration enables; see `DeepSpeedEngine.monitor`.

    Only rank 0 writes; on other ranks, and without monitors, `enabled` is False. Raises
    `ConfigError` if a package is missing. `tb_monitor.summary_writer` is TensorBoard's;
    `tb_monitor`, `wandb_monitor`, `csv_monitor` and `comet_monitor` are None if disabled.
    """

    def __init__(self, monitor_config: Mapping[str, Section]) -> None:
        self.monitor_config = monitor_config
        enabled = {
            name: _WRITERS[name](section)
            for name, section in monitor_config.items()
            if section.get("enabled") and get_rank() == 0
        }
        self.tb_monitor, self.wandb_monitor = enabled.get("tensorboard"), enabled.get("wandb")
        self.csv_monitor, self.comet_monitor = enabled.get("csv_monitor"), enabled.get("comet")
        self._writers = list(enabled.values())
        self.enabled = bool(self._writers)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events to all enabled monitors."""
        events = list(event_list)
        for writer in self._writers:
            writer.write(events)

    def close(self) -> None:
        """Flush and close the writers; later events are dropped."""
        writers, self._writers, self.enabled = self._writers, [], False
        for writer in writers:
            writer.close()


def _directory(section: Section) -> Path:
    """Return the directory of a section's files."""
    root = Path(section.get("output_path", ""))
    return root.expanduser() / str(section.get("job_name", "DeepSpeedJobName"))


def _import_package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the configuration asks for {package}, which is not installed: {error}",
            remedy=f'pip install {package}, or "enabled": false',
        ) from error
