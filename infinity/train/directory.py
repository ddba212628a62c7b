"""Directory of a run: its files, its lock, and its record.

run.json      record of the run: version, settings that determine results, whether it is complete
config.yaml   every value of the configuration and its origin
plan.txt      placement, and bytes moved in a step; plan.json: the same as data
metrics.jsonl a line per step and per evaluation
data/         tokens
checkpoints/  to resume from
tensorboard/  and wandb/, with training.report_to
best/         the weights with the smallest held-out loss so far, with training.keep_best
report.html   page about the run
model/        the trained model, once the run is complete
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity._version import __version__
from infinity.common.checksummed_json import read_sealed, write_sealed
from infinity.common.files import TEMPORARY_NAME, LockFile, atomic_write, make_directories, refused
from infinity.common.parsed_json import Count, Flag, Text, Texts, made
from infinity.config.renamed import migrate_stored_keys
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import CheckpointError, ConfigError, MachineError, listed

RUN_RECORD = "run.json"
CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
_MADE_BEFORE_RECORD = {"data", _LOCK, "config.yaml", "plan.txt", "plan.json"}
_FORMAT, _VERSION = "torch-infinity-training", 3
_TOKENS_NOTE = (
    "; data.tokens is made of the files, by the tokenizer, and of conversations by the chat "
    "template and data.loss_on"
)


@dataclass(frozen=True)
class _RunRecord:
    """Types of the members of `run.json` that are read."""

    id: Text
    name: Text = ""
    complete: Flag = False
    saved: Flag = False
    durable: Flag = False
    ranks: Count = 1
    state: Count = 0
    inode: Count = 0
    origin: Text = ""
    nvme_path: Texts = ()
    sessions: Texts = ()
    experts_per_unit: Count = 0  # 0: derived from the model alone


class RunDirectory:
    """Directory of one run, locked until `close`.

    Only rank 0 locks it and writes to it; all ranks have the same record.
    """

    def __init__(self, path: Path, *, resume: bool, ranks: DistContext = SINGLE_PROCESS) -> None:
        """Create or open the directory.

        Raises `ConfigError` if it holds a run and `resume` is False, or files of no run, and
        `MachineError` if it is not writable or another process trains in it.
        """
        self.path = path.absolute()
        self.tokens, self.checkpoints = self.path / "data", self.path / CHECKPOINTS
        self.metrics = self.path / "metrics.jsonl"
        self.model, self.best = self.path / "model", self.path / "best"
        self._lock: LockFile | None = None
        self.record: dict[str, Any] = {}
        self._ranks = ranks
        with ranks.collective_section("opens the run's directory"):
            if not ranks.rank:
                self._open(resume)
        self.record = ranks.all_gather_object(self.record)[0]

    def _open(self, resume: bool) -> None:
        with self._explained():
            make_directories(self.path)
        if (self.path / RUN_RECORD).exists():
            self.record = self._read_record()
            if not resume:
                description = "a run that is complete" if self.is_complete else "a run"
                raise ConfigError(
                    f"{self.path} holds {description} already",
                    remedy="--resume auto goes on with it; run_dir=... starts another one",
                )
        else:
            with self._explained():
                names = sorted(set(os.listdir(self.path)) - _MADE_BEFORE_RECORD)
            unknown = [n for n in names if not TEMPORARY_NAME.fullmatch(n)]  # of a killed run
            if unknown:
                raise ConfigError(
                    f"{self.path} is not empty, and holds no run: {listed(unknown, 4)}",
                    remedy="run_dir=... a new directory",
                )
        try:
            with self._explained():
                self._lock = LockFile(self.path / _LOCK)
        except BlockingIOError as error:
            raise MachineError(
                f"another process is training in {self.path}",
                remedy="wait until it is over, or run_dir=... another directory",
            ) from error

    def close(self) -> None:
        """Close the files; idempotent."""
        if self._lock is not None:
            self._lock.close()

    # --- the record ------------------------------------------------------------------------------

    @property
    def has_run(self) -> bool:
        """Whether training has begun in this directory."""
        return bool(self.record)

    @property
    def inode(self) -> int:
        """Inode number of the directory; a copy has another."""
        return os.stat(self.path).st_ino

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done and the model is written."""
        return bool(self.record.get("complete"))

    @property
    def decided(self) -> Mapping[str, Any]:
        """Return the recorded settings that determine results, by name; empty for a new run."""
        settings: dict[str, Any] = migrate_stored_keys(self.record.get("decides", {}), "engine.")
        return settings

    def check(self, decides: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if settings differ from those in the record.

        `decides` are the settings that determine results, by name.
        """
        if not self.record:
            return
        recorded, current = self.record["decides"], _as_json(decides)
        changed = [
            f"{name} was {recorded.get(name)!r:.60}, and is {current.get(name)!r:.60}"
            for name in sorted({*recorded, *current})
            if recorded.get(name) != current.get(name)
        ]
        if changed:
            raise ConfigError(
                f"the run in {self.path} cannot go on with other settings: "
                + listed(changed, 6, "; "),
                because="it goes on as if it had never stopped, or not at all"
                + _TOKENS_NOTE * any(name.startswith("data.tokens") for name in changed),
                remedy="restore them; or start a new run, run_dir=..., with model.path=... "
                "this one's model/ directory",
            )

    @contextmanager
    def beginning(self, decides: Mapping[str, Any], **facts: Any) -> Iterator[None]:
        """Context that creates the record if there is none, and removes it if the block raises.

        `facts` are added to a new record.
        """
        if self.record:
            yield
            return
        self.record = {
            "infinity": __version__,
            "id": uuid.uuid4().hex[:12],
            "name": self.path.name,  # stays when the directory is moved
            "complete": False,
            "saved": False,  # whether a checkpoint was ever complete
            "decides": _as_json(decides),
            **_as_json(facts),
        }
        with self._ranks.collective_section("begins a run"):
            self._write_record(self.record)
        self.record = self._ranks.all_gather_object(self.record)[0]
        try:
            yield
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Remove the record of a run that has begun but done no step."""
        self.record = {}
        if not self._ranks.rank:
            (self.path / RUN_RECORD).unlink(missing_ok=True)

    def remember(self, **facts: Any) -> None:
        """Update the record with `facts`; write it if it has changed."""
        record = self.record | _as_json(facts)
        if record != self.record:
            self._write_record(record)
            self.record = record

    def _read_record(self) -> dict[str, Any]:
        path = self.path / RUN_RECORD
        try:
            record = read_sealed(path, _FORMAT, _VERSION)
            made(_RunRecord, record)
            if not isinstance(record["decides"], dict):
                raise ValueError("what decides its numbers is no object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged, which identifies the run: {error}",
                remedy="restore it; or --resume one of its checkpoints/ in another run_dir=...",
            ) from error
        return record

    def _write_record(self, record: Mapping[str, Any]) -> None:
        if self._ranks.rank:
            return
        with self._explained():
            write_sealed(self.path / RUN_RECORD, _FORMAT, _VERSION, record)

    def write(self, name: str, text: str) -> None:
        """Write a small file of the directory atomically; only rank 0 does."""
        if self._ranks.rank:
            return
        with self._explained(), atomic_write(self.path / name) as file:
            file.write(text.encode())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            what = f"the run directory {self.path} cannot be used: {error.filename}"
            remedy = "run_dir=... a directory that can be written"
            raise refused(what, error, self.path, remedy=remedy) from error


class Session:
    """Id of one start of a durable run, committed with its state by `engine.register_state`.

    `last` is the id in a resumed state. `run_dir` is the directory of the run.
    """

    def __init__(self, id: str, run_dir: str) -> None:
        self.id = id
        self.run_dir = run_dir
        self.last = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the id and the run directory."""
        return {"id": self.id, "run_dir": self.run_dir}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the session that committed the state."""
        self.last = str(state.get("id", ""))


def run_record(path: Path) -> dict[str, Any] | None:
    """Return the record of the run in a directory; None if it holds no run, or a damaged record."""
    try:
        record = read_sealed(path / RUN_RECORD, _FORMAT, _VERSION)
        made(_RunRecord, record)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def state_name(record: Mapping[str, Any], path: Path, number: int | None = None) -> str:
    """Return the directory name of a durable run's state below each nvme_path.

    Args:
        record: The run's record.
        path: Directory of the run.
        number: Number of the state, increased when it is replaced; None for that in the record.
    """
    number = record.get("state", 0) if number is None else number
    name = f"{record.get('name', path.name)}-{record['id']}"
    return f"{name}-{number}" if number else name


def state_directories(record: Mapping[str, Any], path: Path) -> list[Path]:
    """Return the state directories of a durable run, one for each nvme_path."""
    paths = record.get("nvme_path", []) if record.get("durable") else []
    return [Path(root) / state_name(record, path) for root in paths]


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as read back from JSON: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(facts), default=str))
    return plain
