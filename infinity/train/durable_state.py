"""State of a run with durable steps: its directories below each nvme_path, and their owner.

[Note: one state, one directory]
The state directory is named after name and id of the run directory, so that no other run uses it.
Copies of a run directory share the id. So each start adds a session id to the record of its
directory before its first commit, and each commit stores the id of its session. If the record does
not list the session of the last commit, a copy of the directory has continued the state, and the
start is refused. A start from a named checkpoint replaces the state: with one of the next number,
after which the former state is removed, if this directory is not a copy; else with one of a new id,
and the former state stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from infinity.checkpoint.durable_reader import DurableReader
from infinity.common.files import sync_directory
from infinity.config.schema import Config
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, InfinityError, MachineError, listed
from infinity.storage.run_dir import directories_by_rank, run_records
from infinity.train.directory import RUN_RECORD, RunDirectory, Session, state_name
from infinity.train.loop import latest
from infinity.train.metrics import recorded_steps
from infinity.train.settings import AUTO, NEVER

_MAX_SESSIONS = 1000  # whose ids the record retains


class DurableState:
    """Owner of the state directories of one run; its methods are collective.

    `left` is a directory of the state if that was written by another number of ranks.
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
        self._replacement: dict[str, Any] = {}  # updates of the record that name a replacing state
        self._replaces = False  # the former state belongs to this run and is removed
        self._created: list[Path] = []
        self._inode = 0  # of the run directory, as rank 0 sees it

    @property
    def name(self) -> str:
        """Name, below each nvme_path, of the current state of a run that has begun."""
        return state_name(self._directory.record, self._directory.path)

    @property
    def moves(self) -> bool:
        """Return True if the state was written by another number of ranks."""
        record = self._directory.record
        return bool(record.get("durable")) and record.get("ranks", 1) != self._ranks.count

    @property
    def _all_paths(self) -> list[Path]:
        """Paths in the configuration and in the record."""
        recorded = map(Path, self._directory.record.get("nvme_path", []))
        return list(dict.fromkeys([*self._config.nvme_path, *recorded]))

    # --- before the engine -----------------------------------------------------------------------

    def choose(self) -> None:
        """Choose the state that this start uses.

        Raises `ConfigError` if the state of this directory is on disk but its record is not.
        """
        record, ranks, resumes = self._directory.record, self._ranks, self._resume == AUTO
        with ranks.collective_section("looks for the state of the run"):
            needs_owner = self._checkpoint is not None or bool(self._other_states())
            owned = needs_owner and not ranks.rank and self._is_owner()
            if self._config.durable and resumes and not record and not ranks.local_rank:
                self._refuse_lost_directory()
        facts = owned, uuid.uuid4().hex[:12], 0 if ranks.rank else self._directory.inode
        owned, new_id, self._inode = ranks.all_gather_object(facts)[0]
        if not record.get("durable") or not self._config.durable:
            return
        number = {"state": record.get("state", 0) + 1}
        if resumes and self.moves:
            self._replacement, self._replaces = number, True
        elif self._checkpoint is not None:
            self._replacement = number if owned else {"id": new_id, "state": 0}
            self._replaces = owned
        if owned or self._replaces:  # left by a start that died before `keep`
            self._remove_other_states()

    def config_for(self, config: Config) -> Config:
        """Return the configuration with the state directories of this run as `nvme_path`.

        Raises `ConfigError` or `CheckpointError` if committed steps would be ignored, and
        `MachineError` if a directory cannot be created.
        """
        record, resumes = self._directory.record, self._resume == AUTO
        if not config.durable:
            if resumes and record.get("durable"):
                raise self._ignored_state_error()
            return config
        resume = AUTO if resumes else NEVER
        if resumes and record.get("durable"):
            states = [path / self.name for path in config.nvme_path]
            directories = run_directories(states)
            if not directories:
                raise CheckpointError(
                    f"the run in {self._directory.path} has its state below "
                    f"{', '.join(map(str, states))}, but no state exists there",
                    because="a drive is not mounted, or the state was moved or removed",
                    remedy="mount it, or engine.nvme_path=... where it is now; a new run needs "
                    "another run_dir=...",
                )
            if self.moves:
                self.left, resume = directories[0], NEVER
        name = state_name(record | self._replacement, self._directory.path)
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
            if self._replacement:
                self._created.append(path)
        return config.model_copy(update={"nvme_path": paths, "resume": resume})

    # --- with the engine -------------------------------------------------------------------------

    def start_session(self, engine: Engine) -> Session:
        """Record and return a new session; refuse a state that a copy has continued.

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
        """Record the engine's state as the state of the run, and remove one that it replaces.

        `state_facts` are recorded with it: see `Prepared`. Returns a note for the user; empty if
        there is none.
        """
        directory, paths = self._directory, self._all_paths
        former = [path / self.name for path in paths]
        facts = self._replacement | {"inode": self._inode, **state_facts}
        directory.remember(
            durable=True,
            nvme_path=list(map(str, self._config.nvme_path)),
            ranks=self._ranks.count,
            **facts,
        )
        self._ranks.synchronize("records its state")
        self._created.clear()
        if self._replaces:
            self._remove_other_states(paths)
        elif self._replacement and (remaining := [path for path in former if path.is_dir()]):
            return (
                f"the former state stays, which may be of another copy of {directory.path}: "
                f"{listed(list(map(str, remaining)), 4)}"
            )
        return ""

    def drop(self) -> None:
        """Remove the directories of a replacing state, unless `keep` has recorded it."""
        while self._created:
            shutil.rmtree(self._created.pop(), ignore_errors=True)

    # --- the directories -------------------------------------------------------------------------

    def _other_states(self, paths: Iterable[Path] | None = None) -> list[Path]:
        """Return state directories of this run with other numbers than the recorded one."""
        record = self._directory.record
        base = state_name(record, self._directory.path, 0) if record else ""
        return [
            state
            for path in (paths or self._all_paths if base else ())
            for state in _subdirectories(path)
            if state.name == base or state.name.removeprefix(f"{base}-").isdigit()
            if state.name != self.name
        ]

    def _remove_other_states(self, paths: Iterable[Path] | None = None) -> None:
        for state in self._other_states(paths) if not self._ranks.local_rank else ():
            shutil.rmtree(state, ignore_errors=True)

    def _is_owner(self) -> bool:
        """Return True if this run directory, not the original of a copy, wrote the state."""
        record = self._directory.record
        if not record.get("durable") or record.get("inode") != self._directory.inode:
            return False
        for run_directory in run_directories([path / self.name for path in self._all_paths]):
            try:
                last = _session_of(run_directory).get("id", "")
            except InfinityError:  # damaged, or in use
                return False
            return not last or last in record.get("sessions", [])
        return False  # a copy may have converted it to another number of ranks

    def _refuse_lost_directory(self) -> None:
        directory = self._directory.path
        entries = [entry for path in self._config.nvme_path for entry in _subdirectories(path)]
        for state in [entry for entry in entries if entry.name.startswith(f"{directory.name}-")]:
            for run_directory in run_directories([state]):
                try:
                    session = _session_of(run_directory)
                except InfinityError:
                    continue
                if session.get("run_dir") == str(directory):
                    raise ConfigError(
                        f"{directory} holds no run, but {state} holds the state of a run in that "
                        "directory",
                        because="a drive is not mounted, or the directory was moved or removed",
                        remedy=f"restore it; or remove {state}, or start without --resume, for a "
                        "new run",
                    )

    def _ignored_state_error(self) -> ConfigError:
        """Return the error for a run whose committed steps would be ignored."""
        directory, num_recorded = self._directory, recorded_steps(self._directory.metrics)
        paths = directory.record.get("nvme_path") or ["..."]
        value = f"[{','.join(paths)}]" if len(paths) > 1 else paths[0]
        checkpoint = latest(directory.checkpoints)
        alternative = f"; or --resume {checkpoint}, and lose the steps since" if checkpoint else ""
        return ConfigError(
            f"the run in {directory.path} did {num_recorded} steps with engine.durable=true, and "
            f"has its state below engine.nvme_path={value}, but engine.durable is now false",
            because="--resume auto goes on from the last committed step, or not at all",
            remedy=f"engine.durable=true engine.nvme_path={value}{alternative}; a new run needs "
            "another run_dir=...",
        )


def rank_directories(paths: Iterable[Path]) -> list[Path]:
    """Return existing paths and the directories of ranks below them."""
    existing = [path for path in paths if path.is_dir()]
    return [
        directory for path in existing for directory in (path, *directories_by_rank(path).values())
    ]


def run_directories(paths: Iterable[Path]) -> list[Path]:
    """Return the durable run directories in these paths, of any rank."""
    return [run for directory in rank_directories(paths) for run in run_records(directory)]


def _subdirectories(path: Path) -> list[Path]:
    try:
        return sorted(Path(entry) for entry in os.scandir(path) if entry.is_dir())
    except OSError:
        return []


def _session_of(directory: Path) -> dict[str, Any]:
    """Return the session of the last commit; raise as `DurableReader` does."""
    with closing(DurableReader(directory)) as reader:
        session = reader.document.run.get("registered", {}).get("session", {})
        return dict(session) if isinstance(session, dict) else {}
