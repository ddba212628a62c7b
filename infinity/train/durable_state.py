"""The state of a run with durable steps: its directories below every nvme_path, and their owner.

[Note: one state, one directory]
A run's state has the name and id of the run directory, so that it is no other run's. Copies of that
directory have the same id. So each start adds the id of its session to the record of its directory
before it commits, and every commit has the id of the session that made it: a directory that does
not know the session has been overtaken by a copy, and is refused. A start from a named checkpoint
replaces the state: by one of the next number, after which the former one is removed, if this
directory is no copy; else by one of a new id, and the former one stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from infinity.checkpoint.durable_reader import DurableReader
from infinity.common.files import sync_directory
from infinity.config.schema import Config
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, InfinityError, MachineError, listed
from infinity.storage.run_dir import ranks_below, run_records
from infinity.train.directory import RUN_RECORD, RunDirectory, Session, state_name
from infinity.train.loop import latest
from infinity.train.metrics import recorded_steps
from infinity.train.settings import AUTO, NEVER

_MAX_SESSIONS = 1000  # of which a run directory keeps the ids


class DurableState:
    """Finds, names, claims and removes the state of one run; all ranks call the same methods.

    `left` is the state of another number of ranks, until it is copied.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        ranks: DistContext,
        resume: str,
        checkpoint: Path | None,
    ) -> None:
        self.left: Path | None = None
        self._directory = directory
        self._config = config
        self._ranks = ranks
        self._resume = resume
        self._checkpoint = checkpoint
        self._next: dict[str, Any] = {}  # facts of the record that name a state which replaces one
        self._replaces = False  # the former state is this run's own, and goes
        self._made: list[Path] = []
        self._inode = 0  # of the directory, on the first rank's machine

    @property
    def name(self) -> str:
        """Name below every nvme_path of the state to go on with; of a run that has begun."""
        return state_name(self._directory.record, self._directory.path)

    @property
    def moves(self) -> bool:
        """Return True if the state is of another number of ranks."""
        record = self._directory.record
        return bool(record.get("durable")) and record.get("ranks", 1) != self._ranks.count

    @property
    def _paths(self) -> list[Path]:
        """Every nvme_path of now and of before."""
        before = map(Path, self._directory.record.get("nvme_path", []))
        return list(dict.fromkeys([*self._config.nvme_path, *before]))

    # --- before the engine -----------------------------------------------------------------------

    def choose(self) -> None:
        """Decide which state this start uses.

        Raises `ConfigError` where the state of this directory is on disk, and its record is not.
        """
        record, ranks, resumes = self._directory.record, self._ranks, self._resume == AUTO
        with ranks.collective_section("looks for the state of the run"):
            asks = self._checkpoint is not None or bool(self._others())
            owned = asks and not ranks.rank and self._is_ours()
            if self._config.durable and resumes and not record and not ranks.local_rank:
                self._refuse_lost_directory()
        facts = (owned, uuid.uuid4().hex[:12], 0 if ranks.rank else self._directory.inode)
        owned, new_id, self._inode = ranks.all_gather_object(facts)[0]
        if not record.get("durable") or not self._config.durable:
            return
        number = {"state": record.get("state", 0) + 1}
        if resumes and self.moves:
            self._next, self._replaces = number, True
        elif self._checkpoint is not None:
            self._next = number if owned else {"id": new_id, "state": 0}
            self._replaces = owned
        if owned or self._replaces:  # of a start that died before its state was whole
            self._remove_others()

    def config_for(self, config: Config) -> Config:
        """Return a configuration whose paths are this run's own, so that it finds no other state.

        Raises `ConfigError` or `CheckpointError` where committed steps would be ignored, and
        `MachineError` where a directory cannot be made.
        """
        record, resumes = self._directory.record, self._resume == AUTO
        if not config.durable:
            if resumes and record.get("durable"):
                raise self._left_aside()
            return config
        resume = AUTO if resumes else NEVER
        if resumes and record.get("durable"):
            found = self._find([path / self.name for path in config.nvme_path])
            if self.moves:
                self.left, resume = found, NEVER
        name = state_name(record | self._next, self._directory.path)
        paths = tuple(path / name for path in config.nvme_path)
        for path in paths if not self._ranks.local_rank else ():
            try:
                path.mkdir(exist_ok=True)
                sync_directory(path.parent)
            except OSError as error:
                raise MachineError(
                    f"{path} cannot be made: {error.strerror}",
                    remedy="engine.nvme_path=... an existing directory that can be written",
                ) from error
            if self._next:
                self._made.append(path)
        return config.model_copy(update={"nvme_path": paths, "resume": resume})

    # --- with the engine -------------------------------------------------------------------------

    def claim(self, engine: Engine) -> Session:
        """Refuse a state that another copy of the run directory has continued.

        See [Note: one state, one directory]. Raises `CheckpointError`, before any commit.
        """
        directory, ranks = self._directory, self._ranks
        session = Session(ranks.all_gather_object(secrets.token_hex(4))[0], str(directory.path))
        with ranks.collective_section("looks for the session of the state"):
            if engine.resumed:
                engine.register_state("session", session)
            elif self.left is not None:
                session.load_state_dict(_session_of(self.left))
            known = directory.record.get("sessions", [])
            if session.last and session.last not in known:
                raise CheckpointError(
                    f"another copy of {directory.path} has continued the state of this run "
                    f"(session {session.last}, which is not in its {RUN_RECORD})",
                    because="the run directory was copied, or was set back to an older copy; all "
                    f"copies share one state below engine.nvme_path, {self.name}",
                    remedy="go on with that copy; or start from a checkpoint: "
                    "--resume .../checkpoints/...",
                )
            directory.remember(sessions=[*known, session.id][-_MAX_SESSIONS:])
        return session

    def keep(self, state_facts: Mapping[str, int]) -> str:
        """Go on with the state of this engine from now on, and with no other.

        `state_facts` are remembered with it: see `Prepared`. Returns a note for the user; empty if
        there is none.
        """
        directory, before = self._directory, self._paths
        former = [path / self.name for path in before]
        facts = self._next | {"inode": self._inode, **state_facts}
        directory.remember(
            durable=True,
            nvme_path=list(map(str, self._config.nvme_path)),
            ranks=self._ranks.count,
            **facts,
        )
        self._ranks.synchronize("keeps its state")
        self._made.clear()
        if self._replaces:
            self._remove_others(before)
        elif self._next and (there := [path for path in former if path.is_dir()]):
            return (
                f"the former state stays, which may be of another copy of {directory.path}: "
                f"{listed(list(map(str, there)), 4)}"
            )
        return ""

    def drop(self) -> None:
        """Remove the directories of a state that was to replace another, and is not kept."""
        while self._made:
            shutil.rmtree(self._made.pop(), ignore_errors=True)

    # --- the directories -------------------------------------------------------------------------

    def _others(self, paths: Iterable[Path] | None = None) -> list[Path]:
        """Return states of this run's id under other numbers; of a run that has begun."""
        record = self._directory.record
        base = state_name(record, self._directory.path, 0) if record else ""
        return [
            found
            for path in (paths or self._paths if base else ())
            for found in _below(path)
            if found.name == base or found.name.removeprefix(f"{base}-").isdigit()
            if found.name != self.name
        ]

    def _remove_others(self, paths: Iterable[Path] | None = None) -> None:
        for found in self._others(paths) if not self._ranks.local_rank else ():
            shutil.rmtree(found, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Return True if this directory made the state, and is no copy of the one that did."""
        record = self._directory.record
        if not record.get("durable") or record.get("inode") != self._directory.inode:
            return False
        for there in run_directories([path / self.name for path in self._paths]):
            try:
                last = _session_of(there).get("id", "")
            except InfinityError:  # it is damaged, or in use
                return False
            return not last or last in record.get("sessions", [])
        return False  # a copy may have moved it to another number of ranks

    def _refuse_lost_directory(self) -> None:
        directory = self._directory.path
        for path in self._config.nvme_path:
            states = [
                found for found in _below(path) if found.name.startswith(f"{directory.name}-")
            ]
            for state in states:
                for there in run_directories([state]):
                    try:
                        session = _session_of(there)
                    except InfinityError:
                        continue
                    if session.get("run_dir") == str(directory):
                        raise ConfigError(
                            f"{directory} holds no run, but {state} holds the state of one that "
                            "was there",
                            because="a drive is not mounted, or the directory was moved or removed",
                            remedy=f"bring it back; or remove {state}, or start without --resume, "
                            "for a new run",
                        )

    def _find(self, paths: Sequence[Path]) -> Path:
        """Return a directory of the state of a durable run, of any rank."""
        there = run_directories(paths)
        if not there:
            raise CheckpointError(
                f"the run in {self._directory.path} keeps its state below "
                f"{', '.join(map(str, paths))}, where there is none",
                because="a drive is not mounted, or the state was moved or removed",
                remedy="mount it, or engine.nvme_path=... where it is now; a new run needs "
                "another run_dir=...",
            )
        return there[0]

    def _left_aside(self) -> ConfigError:
        """Return the error for a run whose committed steps would be ignored."""
        directory, num_recorded = self._directory, recorded_steps(self._directory.metrics)
        paths = directory.record.get("nvme_path") or ["..."]
        given = f"[{','.join(paths)}]" if len(paths) > 1 else paths[0]
        checkpoint = latest(directory.checkpoints)
        instead = f"; or --resume {checkpoint}, and lose the steps since" if checkpoint else ""
        return ConfigError(
            f"the run in {directory.path} did {num_recorded} steps with engine.durable=true, and "
            f"keeps its state below engine.nvme_path={given}; here engine.durable is false",
            because="--resume auto goes on from the last committed step, or not at all",
            remedy=f"engine.durable=true engine.nvme_path={given}{instead}; a new run needs "
            "another run_dir=...",
        )


def rank_directories(paths: Iterable[Path]) -> list[Path]:
    """Where run directories may be: one rank's in a path, each of several ranks' in its own."""
    there = [path for path in paths if path.is_dir()]
    return [directory for path in there for directory in (path, *ranks_below(path).values())]


def run_directories(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories in these paths, of any rank."""
    return [found for directory in rank_directories(paths) for found in run_records(directory)]


def _below(path: Path) -> list[Path]:
    try:
        return sorted(Path(entry) for entry in os.scandir(path) if entry.is_dir())
    except OSError:
        return []


def _session_of(directory: Path) -> dict[str, Any]:
    """Return the session of the last commit; raises as `DurableReader`."""
    with closing(DurableReader(directory)) as reader:
        found = reader.document.run.get("registered", {}).get("session", {})
        return dict(found) if isinstance(found, dict) else {}
