"""Monitors of a DeepSpeed configuration: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.processes import get_rank

Event = tuple[str, float, int]  # label such as Train/Samples/lr, value, samples so far
Section = Mapping[str, Any]


class _TensorBoard:
    """Event files in `output_path/job_name`."""

    def __init__(self, section: Section) -> None:
        library = _import_package("torch.utils.tensorboard", "tensorboard")
        root = Path(section.get("output_path", "")).expanduser()
        directory = root / str(section.get("job_name", "DeepSpeedJobName"))
        self.summary_writer = library.SummaryWriter(log_dir=str(directory))

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


_WRITERS: dict[str, Callable[[Section], Any]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


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
    `tb_monitor` and `wandb_monitor` are None if disabled.
    """

    def __init__(self, monitor_config: Mapping[str, Section]) -> None:
        self.monitor_config = monitor_config
        enabled = {
            name: _WRITERS[name](section)
            for name, section in monitor_config.items()
            if section.get("enabled") and get_rank() == 0
        }
        self.tb_monitor, self.wandb_monitor = enabled.get("tensorboard"), enabled.get("wandb")
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


def _import_package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the configuration asks for {package}, which is not installed: {error}",
            remedy=f'pip install {package}, or "enabled": false',
        ) from error
