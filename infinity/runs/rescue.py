"""Where the drive of a run's state fails: what is whole, and what to type to go on elsewhere."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from infinity.checkpoint.durable_runs import read_run
from infinity.errors import InfinityError, MachineError, TransferError
from infinity.runs.run import Run
from infinity.storage.run_dir import durable_records

OTHER = Path("/other/drive")  # what people put their own in the place of


def elsewhere(error: InfinityError, run: Run, command: Sequence[str]) -> InfinityError:
    """What to raise for an error of a run that has begun, and was closed: `error`, or more words.

    `command` is what was typed, without --resume.
    """
    found = _of_the_state(error, run)
    if found is None:
        return error
    failure, drive = found
    copies, given = [], []
    if _same_drive(run.directory.path, drive):
        copies.append(run.directory.path)
        given.append(f"run_dir={OTHER / run.directory.path.name}")
    checkpoint = _checkpoint(run)
    whole = f"{checkpoint} is whole" if checkpoint else "there is no checkpoint to go on from"
    update, durable = _committed(run), run.config.engine.durable
    others = [path for path in run.config.engine.nvme_path if path != drive]
    if durable and update is None:
        others = []  # they hold parts of what is lost
    if update is not None:
        state = drive / run.state_name
        copies.append(state)
        instead = "no checkpoint is there to go on from instead"
        if checkpoint is not None:
            again = [*command, f"engine.nvme_path={OTHER}", "--resume", str(checkpoint)]
            instead = f"if it cannot be copied, `{shlex.join(again)}` goes on from that checkpoint"
        whole = f"the commit of update {update} in {state} is whole; {instead}"
    paths = ",".join(map(str, [OTHER, *others]))
    given.append(f"engine.nvme_path={f'[{paths}]' if others else paths}")
    steps = [["cp", "-a", *map(str, copies), f"{OTHER}/"]] if copies else []
    # Where steps were durable, auto refuses to go on without the state.
    resume = str(checkpoint) if durable and update is None and checkpoint else "auto"
    steps.append([*command, *given, "--resume", resume])
    stay = f"; or, to stay: {failure.remedy}" if failure.remedy else ""
    return MachineError(
        f"the drive of {drive}, which holds the state of this run, fails: {failure.what}",
        because="; ".join(part for part in (failure.because, whole) if part),
        remedy=" && ".join(map(shlex.join, steps))
        + f"  (with a directory of yours for {OTHER}){stay}",
    )


def _of_the_state(error: BaseException, run: Run) -> tuple[MachineError, Path] | None:
    """The failure behind an error that names a file of the state, and its nvme_path."""
    cause: BaseException | None = error
    while cause is not None:
        moved = isinstance(cause, TransferError)
        if isinstance(cause, MachineError) and (moved or run.trains):
            text = cause.path if isinstance(cause, TransferError) else cause.what
            for path in run.config.engine.nvme_path:
                if f"{path}/" in text and f"{run.directory.path}/" not in text:
                    return cause, path
        cause = cause.__cause__
    return None


def _committed(run: Run) -> int | None:
    """The update that was committed last; None where there is none, or it cannot be read."""
    own = [path / run.state_name for path in run.config.engine.nvme_path]
    with suppress(InfinityError, OSError):
        for directory in durable_records(own[0]) if run.config.engine.durable else ():
            return read_run(directory, own).record.step
    return None


def _checkpoint(run: Run) -> Path | None:
    try:
        return run.last_checkpoint()
    except InfinityError:
        return None


def _same_drive(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except OSError:
        return False
