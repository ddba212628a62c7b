"""DeepSpeed's monitors: steps as TensorBoard events, CSV files, to Weights & Biases, to Comet."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from infinity.common.files import make_directories
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.processes import get_rank

Event = tuple[str, float, int]  # a label such as Train/Samples/lr, its value, and samples so far


@dataclass
class _Section:
    """A section of a configuration that has these keys; others are not looked at."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"
    group: str | None = None
    team: str | None = None
    project: str | None = "deepspeed"
    samples_log_interval: int = 100
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None

    @property
    def folder(self) -> Path:
        """Where files go."""
        return Path(self.output_path or "").expanduser() / self.job_name


@dataclass
class DeepSpeedMonitorConfig:
    """The sections of a configuration that ask for monitors."""

    tensorboard: _Section = field(default_factory=_Section)
    wandb: _Section = field(default_factory=_Section)
    csv_monitor: _Section = field(default_factory=_Section)
    comet: _Section = field(default_factory=partial(_Section, project=None))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a whole configuration, as plain data."""
    made = DeepSpeedMonitorConfig()
    known = {one.name for one in fields(_Section)}
    for section in fields(made):
        given = param_dict.get(section.name) or {}
        kept = {key: v for key, v in given.items() if key in known and v is not None}
        setattr(made, section.name, replace(getattr(made, section.name), **kept))
    return made


class Monitor(ABC):
    """Takes events; it writes on the first rank, where it is `enabled`."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled) and get_rank() == 0

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write them, each with its own samples so far."""

    def close(self) -> None:
        """Write queued records and close the writers; nothing is written from now on."""
        self.enabled = False


class TensorBoardMonitor(Monitor):
    """Event files in `output_path/job_name`, by `torch.utils.tensorboard`.

    Raises `ConfigError` where the package tensorboard is missing.
    """

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        if self.enabled:
            made = _needed("torch.utils.tensorboard", "tensorboard")
            self.summary_writer = made.SummaryWriter(log_dir=str(tensorboard_config.folder))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """See `Monitor`; with `flush` they are in the file when this returns."""
        if self.enabled:
            for label, value, samples in event_list:
                self.summary_writer.add_scalar(label, value, samples)
            if flush:
                self.flush()

    def flush(self) -> None:
        """Write what waits in RAM."""
        if self.enabled:
            self.summary_writer.flush()

    def close(self) -> None:
        """See `Monitor`."""
        if self.enabled:
            self.summary_writer.close()
        super().close()


class WandbMonitor(Monitor):
    """Values of a run of Weights & Biases, which it begins.

    Raises `ConfigError` where the package wandb is missing.
    """

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        if self.enabled:
            self._wandb = _needed("wandb", "wandb")
            self._wandb.init(
                project=wandb_config.project, group=wandb_config.group, entity=wandb_config.team
            )

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: Any = None) -> None:
        """As `wandb.log`."""
        if self.enabled:
            self._wandb.log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See `Monitor`."""
        for label, value, samples in event_list:
            self.log({label: value}, step=samples)

    def close(self) -> None:
        """See `Monitor`; the run is finished."""
        if self.enabled:
            self._wandb.finish()
        super().close()


class CometMonitor(Monitor):
    """Metrics of an experiment of Comet, which it starts: every `samples_log_interval` samples.

    Raises `ConfigError` where the package comet_ml is missing.
    """

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self._last: dict[str, int] = {}  # samples at a label's last metric
        if self.enabled:
            names = ("api_key", "workspace", "project", "experiment_key", "online", "mode")
            given = {name: getattr(comet_config, name) for name in names}
            self.experiment = _needed("comet_ml", "comet_ml").start(**given)
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See `Monitor`."""
        interval = self.monitor_config.samples_log_interval
        for label, value, samples in event_list if self.enabled else ():
            if label not in self._last or samples - self._last[label] >= interval:
                self._last[label] = samples
                self.experiment.log_metric(label, value, step=samples)

    def close(self) -> None:
        """See `Monitor`; the experiment is ended."""
        if self.enabled:
            self.experiment.end()
        super().close()


class csvMonitor(Monitor):  # noqa: N801
    """A file for each label in `output_path/job_name`, with a line `samples,value` for each event.

    Train/Samples/lr is in Train_Samples_lr.csv; a file that is there is gone on with.
    """

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        if self.enabled:
            make_directories(csv_config.folder)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See `Monitor`."""
        for label, value, samples in event_list if self.enabled else ():
            name = label.replace("/", "_").replace(" ", "_")
            path = self.monitor_config.folder / f"{name}.csv"
            begun = path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not begun:
                    writer.writerow(["step", label.rpartition("/")[2]])
                writer.writerow([samples, value])


class MonitorMaster(Monitor):
    """All that a configuration asks for, as `DeepSpeedEngine.monitor`."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        self._all = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        self.enabled = any(one.enabled for one in self._all)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See `Monitor`."""
        events = list(event_list)
        for one in self._all:
            one.write_events(events)

    def close(self) -> None:
        """See `Monitor`."""
        for one in self._all:
            one.close()
        super().close()


def _needed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the configuration asks for {package}, which is not installed: {error}",
            remedy=f'pip install {package}, or "enabled": false',
        ) from error
