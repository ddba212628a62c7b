"""Search for durable runs on disk, and the choice of the one to resume."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.commits import COMMIT_NAMES, CommitRecord, intact_records, read_commits
from infinity.checkpoint.durable_plan import (
    PLAN_NAME,
    differences,
    parameter_shapes,
    plan_checksum,
    plan_of,
    read_plan,
    run_file_errors,
    state_tag,
)
from infinity.common.files import json_lines, read_small
from infinity.distributed.context import SINGLE_PROCESS, DistContext, format_ranks
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.plan.plan import Plan
from infinity.plan.planner import Stored
from infinity.storage.disk import STATE_NAME
from infinity.storage.run_dir import (
    RECORD_NAME,
    died_while_marking,
    directories_by_rank,
    durable_records,
    foreign_reason,
    has_commits,
    is_live,
    of_rank,
    read_record,
    run_records,
    unmark_durable,
)
from infinity.storage.striping import Striping
from infinity.types import PAGE

SUMS_NAME = "checksums.bin"


@dataclass(frozen=True)
class StoredRun:
    """Durable run that is not active: its first directory, facts, plan and last commit.

    With several ranks, the directories of one rank; their last common commit is agreed on later.
    """

    directory: Path
    facts: Mapping[str, Any]
    plan: Plan
    striping: Striping
    record: CommitRecord
    sequences: tuple[int, ...]  # of its intact commit records

    @property
    def group(self) -> str:
        """Key that the directories of all ranks share."""
        return str(self.facts.get("group", self.facts["run"]))

    @property
    def stored(self) -> Stored:
        """Facts that a new plan takes over."""
        plan = self.plan
        return Stored(str(self.directory), self.record.step, plan.placements, plan.chunk_elements)

    def __str__(self) -> str:
        return f"{self.directory} (update {self.record.step}, {self.record.when})"


def read_run(directory: Path, roots: Iterable[Path] = ()) -> StoredRun:
    """Read a durable run from any of its directories; `roots` are searched for moved ones.

    Raises `CheckpointError` if it is not a durable run, is damaged, or lacks a directory.
    """
    remedy = "give the directory infinity-run-... below an nvme_path"
    with run_file_errors(directory / RECORD_NAME, remedy):
        record = read_record(directory)
    if record.get("durable") is not True:
        raise CheckpointError(f"{directory} is not a durable run, according to its {RECORD_NAME}")
    directory = _first_directory(directory, record, roots)
    facts = read_plan(directory)
    results = read_commits(directory, facts["run"], len(facts["units"]))
    records = intact_records(directory, results)
    commit = records[max(records)]
    if commit.plan and commit.plan != plan_checksum(facts):
        raise CheckpointError(
            f"{directory / PLAN_NAME} is not the plan of the state in its directory: it has "
            f"CRC32C {plan_checksum(facts)}, update {commit.step} was committed with {commit.plan}",
            because="it was changed, or is of another run: names and ranges may be shifted",
            remedy=f"restore {PLAN_NAME} from the same copy as the other files",
        )
    directories = _run_directories(directory, facts, roots)
    striping = Striping(
        directories=directories,
        stripe_bytes=int(facts["stripe_bytes"]),
        speeds=tuple(facts["speeds"]),
        capacities=tuple(facts["room"]),
        used=tuple(facts["used"]),
    )
    _check_files(striping, facts["run"])
    sequences = tuple(sorted(key.sequence for key in records))
    return StoredRun(directory, facts, plan_of(facts), striping, commit, sequences)


def read_all_ranks(directory: Path, roots: Iterable[Path]) -> list[StoredRun]:
    """Read the directories of all ranks of a run, in order of rank, given any of them.

    Those of other ranks are searched for next to it and next to `roots`. Raises as `read_run` does.
    """
    roots = list(roots)
    run = read_run(directory, roots)
    count = run.plan.ranks
    if count == 1:
        return [run]
    runs = {run.plan.rank: run}
    parents = dict.fromkeys(path.parent for path in (*roots, *run.striping.directories))
    bases = dict.fromkeys(base for path in parents for base in (path, path.parent))
    for rank in range(count):
        rank_dirs = [of_rank(base, rank) for base in bases if of_rank(base, rank).is_dir()]
        for path, record in [item for p in rank_dirs for item in durable_records(p).items()]:
            if rank not in runs and not record.get("index", 0):
                facts = read_plan(path)
                if (facts.get("group"), facts.get("rank")) == (run.group, rank):
                    runs[rank] = read_run(path, rank_dirs)
    if missing := [rank for rank in range(count) if rank not in runs]:
        raise CheckpointError(
            f"the durable run in {run.directory} is of {count} ranks; the directories "
            f"of {format_ranks(missing)} are missing",
            because=f"none of them is below {', '.join(map(str, bases))}",
            remedy="mount that drive, or copy them from the other node",
        )
    return [runs[rank] for rank in range(count)]


def _first_directory(directory: Path, record: Mapping[str, Any], roots: Iterable[Path]) -> Path:
    """Return the directory of a run with its plan and commits; raises `CheckpointError`."""
    if not record.get("index", 0):
        return directory
    first = Path(str(record.get("primary")))
    directories = _directories_by_index(record.get("run"), [*roots, first.parent])
    if 0 not in directories:
        raise CheckpointError(
            f"{directory} belongs to a durable run whose first directory, {first}, is missing",
            remedy="mount that drive",
        )
    return directories[0]


def _check_files(striping: Striping, run: str) -> None:
    """Raise `CheckpointError` unless all state files exist and belong to this run."""
    for index, (directory, used) in enumerate(
        zip(striping.directories, striping.used, strict=True)
    ):
        path = directory / STATE_NAME
        try:
            tag = read_small(path, used, PAGE)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if tag != state_tag(run, index):
            content = tag.rstrip(b"\0").decode(errors="replace")
            reason = f"its last page, at byte {used}, reads {content!r:.100}: damaged or exchanged"
            if len(tag) < PAGE:
                reason = f"it was cut short, to less than {used + PAGE} bytes"
            raise CheckpointError(f"{path} is not part {index} of run {run}", because=reason)


def _run_directories(
    directory: Path, facts: Mapping[str, Any], roots: Iterable[Path]
) -> tuple[Path, ...]:
    """Return the directories of a run, one for each of its paths."""
    recorded = [Path(name) for name in facts["directories"]]
    # Directories that the user names come first: they may be a copy of the recorded ones.
    search_dirs = [*roots, directory.parent, *(path.parent for path in recorded)]
    by_index = {**_directories_by_index(facts["run"], search_dirs), 0: directory}
    missing = [str(path) for index, path in enumerate(recorded) if index not in by_index]
    if missing:
        raise CheckpointError(
            f"the durable run in {directory} spreads over {len(recorded)} paths; missing: "
            f"{', '.join(missing)}",
            remedy="mount that drive, or name the path where it is now in nvme_path",
        )
    return tuple(by_index[index] for index in range(len(recorded)))


def _directories_by_index(run: object, parents: Iterable[Path]) -> dict[int, Path]:
    """Return the directories of a run by index; those in earlier parents take precedence."""
    directories: dict[int, Path] = {}
    for parent in dict.fromkeys(parents):
        for path, record in durable_records(parent).items() if parent.is_dir() else ():
            if record.get("run") == run:
                directories.setdefault(int(record.get("index", -1)), path)
    return directories


def find_run(
    roots: Sequence[Path],
    resume: str | Path,
    current: Mapping[str, Any],
    step_log: Path | None = None,
    ranks: DistContext = SINGLE_PROCESS,
) -> StoredRun | None:
    """Return the local rank's directories of the durable run to resume; None for a new run.

    `resume` is "never", "auto", or a directory (of any rank); `current` are the `model_facts` of
    this run; `step_log` is a log in which an earlier run may have recorded its steps. Raises
    `ConfigError` if "auto" finds several runs that fit, or signs of one that cannot be resumed, and
    if the given run does not fit; and as `read_run` does. Collective: all ranks resume the same
    run, and raise if one does.
    """
    if resume == "never":
        return None
    directory = None if resume == "auto" else Path(resume).expanduser().absolute()
    if directory is not None and ranks.count == 1:
        run = read_run(directory, roots)
        problems = differences(run.facts, current)
        if problems:
            raise ConfigError(
                f"the durable run in {directory} does not fit this model: {'; '.join(problems)}",
                remedy="resume: never starts a new run; the old one stays",
            )
        return run
    local, elsewhere, remote = _search_directories(roots, ranks)
    local_survey = survey(local, current)
    local_runs = [run for run in local_survey.fitting if run.plan.rank == ranks.rank]
    runs = {run.group if ranks.count > 1 else str(run.directory): run for run in local_runs}
    signs = [*local_survey.doubtful, *survey(elsewhere, current).doubtful]
    for run in (run for run in local_survey.fitting if run.plan.rank != ranks.rank):
        reason = f"it holds the shards of rank {run.plan.rank}, not of rank {ranks.rank}"
        signs.append((run.directory, reason))
    misplaced = survey(remote, current).fitting
    named = None
    if directory is not None and (directory / PLAN_NAME).exists():
        named = read_run(directory, roots).group
    local_report = _RankReport(
        fitting={group: (str(run), run.sequences) for group, run in runs.items()},
        signs=[f"{path}: {reason}" for path, reason in signs],
        named=named,
        steps=_durable_steps(step_log) if step_log is not None else 0,
        misplaced=[str(run) for run in misplaced],
    )
    ranks.synchronize("looks for a durable run")
    reports = [_RankReport(**fields) for fields in ranks.all_gather_object(asdict(local_report))]
    groups = dict.fromkeys(group for report in reports for group in report.fitting)
    started = [group for group in groups if _has_started(group, reports)]
    if directory is None:
        group = _choose_group(started, reports, roots, step_log)
    else:
        group = next(
            (report.named for report in reports if report.named is not None), str(directory)
        )
    missing = [r for r, report in enumerate(reports) if group not in (None, *report.fitting)]
    if missing:
        raise ConfigError(
            f"the durable run {group} cannot be resumed: {format_ranks(missing)} found no "
            f"directory of it below {', '.join(map(str, roots))} that fits",
            because="; ".join(sign for report in reports for sign in report.signs)
            or "a drive is not mounted, or the ranks of a node have other numbers than before",
            remedy="mount it, or start the nodes in the previous order; or start a new run "
            "(resume: never), and load a checkpoint",
        )
    for other, run in runs.items():
        if other not in started:  # its start died while marking the directories: it has no state
            unmark_durable(run.striping.directories, run.facts["run"])
    return None if group is None else runs[group]


@dataclass(frozen=True)
class _RankReport:
    """Report of one rank to the others about the runs it found.

    `fitting` maps the group of a run to a description of its local directories and the sequence
    numbers of its commits; `signs` describe directories that cannot be resumed from; `named` is the
    group of the given directory; `steps` counts those in the step log; `misplaced` describes
    directories of ranks that are not on this machine.
    """

    fitting: dict[str, tuple[str, Sequence[int]]]
    signs: list[str]
    named: str | None
    steps: int
    misplaced: list[str]


def _has_started(group: str, reports: Sequence[_RankReport]) -> bool:
    """Return True if a run was marked durable on all ranks, or has a second commit on one."""
    entries = [report.fitting[group] for report in reports if group in report.fitting]
    return len(entries) == len(reports) or any(max(numbers) > 0 for _, numbers in entries)


def _choose_group(
    started: Sequence[str],
    reports: Sequence[_RankReport],
    roots: Sequence[Path],
    step_log: Path | None,
) -> str | None:
    """Return the group of the run that `resume: auto` resumes, if any, from all ranks' reports."""
    if signs := [sign for report in reports for sign in report.signs]:
        raise ConfigError(
            "resume: auto finds signs of a run that it cannot resume: " + "; ".join(signs),
            because="starting over, or resuming another run, could lose steps",
            remedy="restore the missing files, or end that process; or name the run to resume "
            "(resume: DIRECTORY); or start a new one next to it (resume: never); or remove those "
            "directories if nothing in them is needed any more",
        )
    if len(started) > 1:
        labels = [
            next(report.fitting[g][0] for report in reports if g in report.fitting) for g in started
        ]
        raise ConfigError(
            f"{len(started)} durable runs fit the model: {', '.join(labels)}",
            because="resume is auto",
            remedy=f"resume: {labels[-1].split(' (')[0]}, or remove those that are not needed",
        )
    if not started and (steps := max(report.steps for report in reports)):
        raise ConfigError(
            f"resume: auto finds no durable run below {', '.join(map(str, roots))}, but the "
            f"step log {step_log} has {steps} durable steps",
            because="a drive is not mounted, or the run was moved or removed",
            remedy="mount it; or start a new run: resume: never",
        )
    if not started and (labels := [label for report in reports for label in report.misplaced]):
        raise ConfigError(
            f"resume: auto finds a durable run in directories of other ranks: {', '.join(labels)}",
            because="the ranks of a machine have other numbers than before",
            remedy="start the machines in the previous order; or a new run (resume: never)",
        )
    return started[0] if started else None


def _search_directories(
    roots: Sequence[Path], ranks: DistContext
) -> tuple[list[Path], list[Path], list[Path]]:
    """Return directories with runs of this rank, of other rank counts, and of remote ranks.

    Only the first rank of a machine gets the last two.
    """
    others = [item for root in roots for item in directories_by_rank(root).items()]
    if ranks.count == 1:
        return list(roots), [path for _, path in others], []
    local = [path for root in roots if (path := of_rank(root, ranks.rank)).is_dir()]
    if ranks.local_rank:
        return local, [], []
    surplus = [path for number, path in others if number >= ranks.count]
    remote = {*range(ranks.count)}.difference(ranks.local_ranks)
    return local, [*roots, *surplus], [path for number, path in others if number in remote]


def _durable_steps(step_log: Path) -> int:
    """Return the number of steps in a log since its last start; 0 if that was not durable."""
    steps, durable = 0, False
    with suppress(OSError):
        for _, record in json_lines(step_log):
            with suppress(KeyError, TypeError):
                if record["event"] == "start":
                    steps, durable = 0, record["config"]["durable"]["value"]
                steps += record["event"] == "step"
    return steps if durable else 0


@dataclass(frozen=True)
class Survey:
    """Durable runs below some paths.

    `fitting` can be resumed. `foreign` are intact, and of other models. `doubtful` may be the
    intended run: they are in use, damaged, incomplete, links, of other users, or of other settings.
    The last two hold directories with the reason.
    """

    fitting: list[StoredRun]
    foreign: list[tuple[Path, str]]
    doubtful: list[tuple[Path, str]]


def survey(roots: Iterable[Path], current: Mapping[str, Any]) -> Survey:
    """Classify the durable runs below `roots` for a run whose `model_facts` are `current`."""
    result = Survey([], [], [])
    roots = list(roots)
    records = {path: record for root in roots for path, record in run_records(root).items()}
    for directory, record in records.items():
        if record.get("durable") is False and has_commits(directory, record):
            reason = "its run.json is an older copy, from before the run's first step"
            result.doubtful.append((directory, reason))
        is_sign = record.get("durable") is not False and (record or _may_be_durable(directory))
        if not is_sign or died_while_marking(directory, record):
            continue
        try:
            first = _first_directory(directory, record, roots)
            if first != directory and first in records:
                continue  # reported with its first directory
            facts = read_plan(first)
            if parameter_shapes(facts) != parameter_shapes(current):
                result.foreign.append((directory, "; ".join(differences(facts, current))))
            elif reason := foreign_reason(directory):
                result.doubtful.append((directory, reason))
            elif is_live(first):
                process = f"process {record.get('pid')} on {record.get('hostname')}"
                result.doubtful.append((directory, f"it is in use by {process}"))
            elif first != directory:
                reason = f"its run's first directory, {first}, is not below nvme_path"
                result.doubtful.append((directory, reason))
            elif problems := differences(facts, current):
                result.doubtful.append((directory, "; ".join(problems)))
            else:
                result.fitting.append(read_run(directory, roots))
        except InfinityError as error:
            result.doubtful.append((directory, foreign_reason(directory) or error.what))
    return result


def _may_be_durable(directory: Path) -> bool:
    """Return True if a run without a record may have been durable, or cannot be read."""
    try:
        return not {PLAN_NAME, *COMMIT_NAMES}.isdisjoint(os.listdir(directory))
    except OSError:
        return os.path.lexists(directory)


def remarks(roots: Sequence[Path], resume: str | Path, current: Mapping[str, Any]) -> list[str]:
    """Return notes for a new run about durable runs that it leaves unchanged."""
    result = survey(roots, current)
    fitting = result.fitting
    left_alone = result.foreign + [
        (path, reason) for path, reason in result.doubtful if not foreign_reason(path)
    ]
    notes = [f"a durable run in {path} is left unchanged: {reason}" for path, reason in left_alone]
    if resume == "never" and len(fitting) == 1:
        notes.append(
            f"a durable run of this model is in {fitting[0]}; resume: auto (with durable: "
            "true) would resume it"
        )
    elif resume == "never" and fitting:
        notes.append(
            f"durable runs of this model are in {', '.join(map(str, fitting))}; resume: DIRECTORY "
            "would resume one of them"
        )
    return notes
