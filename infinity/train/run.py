"""Run of `infinity train`, from its directory to the exported model.

>>> with Run(load_run_config("run.yaml"), resume="auto") as run:
...     run.prepare()
...     result = run.train(watcher)
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from infinity._initialize import device_for, initialize
from infinity.checkpoint.directory import checkpoints, find_tag
from infinity.checkpoint.durable_runs import read_run
from infinity.checkpoint.manifest import LATEST_NAME
from infinity.checkpoint.streams import state_streams
from infinity.common.files import free_bytes
from infinity.common.sizes import format_size
from infinity.distributed.compare import check_equal
from infinity.distributed.context import DistContext
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    InfinityError,
    MachineError,
    RemovedError,
    TransferError,
    listed,
)
from infinity.integrations.huggingface.batches import shared
from infinity.integrations.huggingface.packages import transformers
from infinity.integrations.huggingface.save import save_pretrained
from infinity.model.weight_directory import holds_weights
from infinity.plan.batch_schedule import ScheduleResult
from infinity.plan.plan import Plan
from infinity.storage.devices import resolve_device
from infinity.storage.os_errors import checked_root
from infinity.storage.run_dir import durable_records
from infinity.train.best import Best
from infinity.train.data import Progress
from infinity.train.directory import RunDirectory
from infinity.train.durable_state import DurableState, rank_directories
from infinity.train.loop import Compute, Loop, last_checkpoint_clause, latest
from infinity.train.metrics import (
    LastStep,
    Metrics,
    NullMetrics,
    Result,
    TrainCallback,
    environment,
    recorded_steps,
)
from infinity.train.preparation import (
    Prepared,
    build,
    check_schedule,
    extend_schedule,
    loss_of,
    prepare_run,
    resumed_settings,
    scheduled,
)
from infinity.train.sample import record_sample
from infinity.train.settings import AUTO, NEVER, RunConfig, as_yaml
from infinity.train.trackers import Trackers, check_trackers
from infinity.train.windows import BatchIterator

_SIGNAL_INTERVAL_S = 60.0  # interval at which rank 0 signals progress to waiting ranks
OTHER_DRIVE = Path("/other/drive")  # placeholder for a directory of the user's
_HEADING = """\
Arguments of this run; defaults and derived values are in comments.
This file can be given to `infinity train` again; relative paths are from {}"""


class Run:
    """One run, as a context manager; call `prepare`, then `train`.

    `resume` is "never", "auto" (resume the run in the directory, else begin) or the path of a
    checkpoint. `ranks` is the distributed context, by default as `initialize` finds it; only rank 0
    writes files and displays. `command` is the command line, for metrics. Raises `ConfigError` or
    `MachineError` for a directory that cannot be used.
    """

    def __init__(
        self,
        config: RunConfig,
        resume: str = NEVER,
        ranks: DistContext | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.command = shlex.join(command)
        self.resume = resume
        self.ranks = ranks or find_ranks()
        self._engine_owns_ranks = False  # an engine uses `ranks`, and closes it
        self._is_new = True  # no run in the directory before this start
        with self.ranks.collective_section("looks for a run"):
            transformers()  # raises before any work if it is not installed
            self.checkpoint = None if resume in (NEVER, AUTO) else _find_checkpoint(Path(resume))
        self.directory = RunDirectory(config.run_dir, resume=resume != NEVER, ranks=self.ranks)
        self.state = DurableState(
            self.directory, config.engine, self.ranks, resume, self.checkpoint
        )
        if self.checkpoint is not None:
            with self.ranks.collective_section("looks for checkpoints"):
                last = latest(self.directory.checkpoints)
                if last is not None and self.checkpoint.parent != self.directory.checkpoints:
                    self.directory.close()
                    raise ConfigError(
                        f"{self.directory.path} has checkpoints of its own run, the last is "
                        f"{last}; {self.checkpoint} is of another",
                        because="--resume auto could not choose between them",
                        remedy="run_dir=... a new directory, to go on from that checkpoint there",
                    )
        self.prepared: Prepared | None = None
        self.chosen: ScheduleResult | None = None
        """Result of the choice of the batch schedule, if the plan made one."""
        self.trains = False
        """Whether an engine was created."""

    def prepare(self, progress: Progress | None = None) -> Prepared:
        """Check everything and prepare the corpus.

        `progress(done_bytes, total_bytes, what)` is called for the corpus. Raises the errors of
        `prepare_run`, before anything is allocated or trained.
        """
        directory, ranks = self.directory, self.ranks
        with ranks.collective_section("prepares a run"), _rank_0_first(ranks, progress) as report:
            for path in self.config.engine.nvme_path:  # before tokenization, which may take hours
                checked_root(path)
            if not ranks.rank:
                check_trackers(self.config.training.report_to)
            prepared = prepare_run(self.config, directory.tokens, report, ranks.count)
        with ranks.collective_section("plans a run"):
            experts = directory.record.get("experts_per_unit", 0)
            if self.resumes_state and experts and prepared.engine.experts_per_unit == "auto":
                engine = prepared.engine.model_copy(update={"experts_per_unit": experts})
                prepared = replace(prepared, engine=engine)  # the layout of the state on disk
            if self.config.plans_batch_schedule:
                prepared = self._with_batch_schedule(prepared)
            self.prepared = prepared
            check_schedule(prepared, directory, self.checkpoint)
            directory.check(resumed_settings(prepared, directory.decided))
            heading = _HEADING.format(Path.cwd())
            directory.write("config.yaml", as_yaml(self.config, prepared.derived(), heading))
        check_equal(ranks, "the run", prepared.decides() | {"training.steps": prepared.steps})
        return prepared

    def _with_batch_schedule(self, prepared: Prepared) -> Prepared:
        """Set the batch schedule to that chosen by the plan of rank 0."""
        ranks, windows = self.ranks, prepared.windows_per_step
        with ranks.collective_section("chooses micro-batches"):
            if not ranks.rank:
                with closing(resolve_device(device_for(None, ranks))) as device:
                    prepared, self.chosen = scheduled(
                        prepared,
                        self.directory.decided,
                        device,
                        ranks,
                        retain_expert_ranges=self.resumes_state,
                    )
        engine = shared(prepared.engine, ranks)
        micro_batch = windows // (engine.gradient_accumulation_steps * ranks.count)
        return replace(prepared, engine=engine, micro_batch=micro_batch)

    @property
    def resumes_state(self) -> bool:
        """Whether the run resumes state on disk in place, so that its layout is fixed."""
        durable = self.config.engine.durable
        return durable and self.resume == AUTO and self.directory.has_run and not self.state.moves

    def train(self, watcher: TrainCallback, progress: Progress | None = None) -> Result:
        """Train to the end or until the watcher requests a stop; save, and export at the end.

        `progress` is called for the first write of the state. Raises the errors of training;
        earlier checkpoints stay.
        """
        prepared, directory, ranks = self.prepared, self.directory, self.ranks
        assert prepared is not None
        self._is_new = not directory.has_run
        self.state.choose()
        with directory.beginning(prepared.decides(), **prepared.state_facts):
            with ranks.collective_section("builds the model"):
                model = build(self.config, prepared.facts, prepared.engine)
                compute = loss_of(model)
                # Set explicitly: `initialize` warns of these defaults only in loops of users.
                explicit = {
                    "precision": prepared.engine.precision,
                    "gradient_clipping": prepared.engine.gradient_clipping,
                }
                config = self.state.config_for(prepared.engine).model_copy(update=explicit)
            self._engine_owns_ranks = True
            engine, _, _, _ = initialize(model, config, progress=progress, ranks=ranks)
            try:
                with ranks.collective_section("checks free space"):
                    self._check_free_space(engine.plan, watcher)
            except BaseException:
                engine.close()
                raise
        self.trains = True
        try:
            with ranks.propagate_errors("infinity train"):
                return self._train(engine, compute, watcher)
        except BaseException:
            with suppress(InfinityError):  # would hide the original error
                engine.close()
            raise
        finally:
            engine.close()
            self.state.drop()

    def _train(self, engine: Engine, compute: Compute, watcher: TrainCallback) -> Result:
        prepared, directory, ranks = self.prepared, self.directory, self.ranks
        assert prepared is not None
        engine.train()
        training, data = self.config.training, self.config.data
        if ranks.rank and prepared.engine.seed is not None:
            torch.manual_seed(prepared.engine.seed + ranks.rank)  # separate dropout on each rank
        reel = BatchIterator(
            prepared.train, prepared.micro_batch, training.seed, data.shuffle, ranks
        )
        engine.register_state("windows", reel)
        last_step = LastStep()
        engine.register_state("last_step", last_step)
        try:
            session = self.state.start_session(engine) if prepared.engine.durable else None
            source = self._load_state(engine, reel, prepared)
            if session is not None and not engine.resumed:
                engine.register_state("session", session)  # after loading: no checkpoint has it
        except BaseException:
            if self._is_new:
                directory.free()
            raise
        if source:
            watcher.note(f"going on from {source}")
        if note := extend_schedule(engine.lr_scheduler, prepared):
            watcher.note(note)
        if prepared.engine.durable:
            if note := self.state.keep(prepared.state_facts):
                watcher.note(note)
        elif directory.record.get("durable"):  # resumed from a named checkpoint instead
            directory.remember(durable=False)
        with ranks.collective_section("records the run"):
            directory.remember(decides=prepared.decides())
        best, done = Best(of=prepared.held_out), reel.taken // prepared.windows_per_step
        engine.register_state("evaluations", best)  # after loading: older runs do not have it
        if best.anew:
            watcher.note("the held-out data have changed: the best loss is reset")
        if not ranks.all_gather_object(directory.best.is_dir())[0]:
            best.kept, best.kept_step = math.inf, -1  # saved elsewhere, or removed
        keeps_best = training.keep_best
        if keeps_best is None:
            keeps_best = training.early_stop is not None
        keep_best = partial(self._export, path=directory.best) if keeps_best else None
        with self._open_metrics(done, engine.device) as metrics:
            for note in metrics.notes:
                watcher.note(note)
            if self.resume == AUTO:
                metrics.catch_up(last_step)
            loop = Loop(
                prepared, engine, reel, compute, metrics, last_step, directory.checkpoints,
                watcher, best, self._record_saved, keep_best,
            )  # fmt: skip
            if not loop.ended:
                directory.remember(complete=False)
            loop.run()
            result = self._finish(loop, watcher)
            metrics.stopped_early = result.stopped_early
            return result

    def _export(self, engine: Engine, path: Path) -> Path:
        """Write the weights in transformers' format to `path`, and return it."""
        assert self.prepared is not None
        precision = self.config.training.export
        dtype = None if precision in ("auto", "none") else precision
        save_pretrained(engine, path, tokenizer=self.prepared.tokenizer, dtype=dtype)
        return path

    def _check_free_space(self, plan: Plan, watcher: TrainCallback) -> None:
        """Warn if `keep_last` + 1 checkpoints do not fit; refuse to begin if one does not.

        State on disk is already allocated. Raises `DoesNotFitError`.
        """
        training, path = self.config.training, self.directory.path
        state_only = (
            self.config.engine.durable and "checkpoint_every" not in training.model_fields_set
        )
        if state_only or self.ranks.rank:
            return
        nbytes = sum(spec.nbytes for stream in state_streams(plan).values() for spec in stream)
        free, count = free_bytes(path), training.keep_last + 1
        summary = (
            f"{path}: a checkpoint takes {format_size(nbytes)}, and {format_size(free)} are free"
        )
        if self._is_new and free < nbytes:
            raise DoesNotFitError(
                summary,
                because=f"{format_size(nbytes - free)} are missing, and without a checkpoint a run "
                "that stops cannot be resumed",
                remedy="run_dir=... on another drive, or free space on this one; with "
                "engine.nvme_path also engine.durable=true: the state on disk is the checkpoint",
            )
        if self._is_new and free < count * nbytes:
            watcher.note(
                f"{summary}: there are {count} while one is written (training.keep_last: "
                f"{training.keep_last}); those that do not fit are reported, and tried again"
            )

    def _open_metrics(self, done: int, device: torch.device) -> Metrics:
        """Open the metrics after `done` steps; only rank 0 writes them."""
        ranks, directory = self.ranks, self.directory
        metrics: Metrics | None = None
        with ranks.collective_section("opens the metrics"):
            if not ranks.rank:
                assert self.prepared is not None
                facts = environment(device) | {
                    "ranks": ranks.count,
                    "num_steps": self.prepared.steps,
                    "command": self.command,
                }
                settings = {name: str(value) for name, value in self.prepared.decides().items()}
                trackers = Trackers(
                    self.config.training.report_to,
                    directory.path,
                    identity=directory.record["id"],
                    after=done,
                    settings=settings,
                )
                metrics = Metrics(directory.metrics, after=done, trackers=trackers, facts=facts)
        evaluated = [] if metrics is None else sorted(metrics.evaluated)
        evaluated = ranks.all_gather_object(evaluated)[0]
        return NullMetrics(evaluated) if metrics is None else metrics

    def _finish(self, loop: Loop, watcher: TrainCallback) -> Result:
        """Save the last checkpoint and, if the run has ended, export; return the result."""
        prepared, directory = loop.prepared, self.directory
        stopped = not loop.ended
        loop.save_last()
        model = None
        if not stopped and prepared.config.training.export != "none":
            model = directory.model
            if not directory.is_complete or not holds_weights(model):
                watcher.note("writing the model")
                self._export(loop.engine, model)
            watcher.note(f"model: {model}")
        if loop.unsaved is not None:
            loop.save_last()  # the cause may have been removed during the export
        if (error := loop.unsaved) is not None and not prepared.engine.durable:
            kind = DoesNotFitError if isinstance(error, DoesNotFitError) else MachineError
            raise kind(
                f"the state after step {loop.step} was not saved: {error.what}; "
                f"{loop.failed_saves} saves failed; {last_checkpoint_clause(loop.checkpoints)}"
                + (f"; the model is complete: {model}" if model is not None else ""),
                because=error.because,
                remedy=f"{error.remedy or 'look at that drive'}; then --resume auto goes on from "
                "there",
            )
        if not stopped:
            if not directory.is_complete:
                record_sample(loop)
            directory.remember(complete=True, steps=loop.step)
        return Result(
            steps=loop.step,
            num_steps=prepared.steps,
            stopped=stopped,
            loss=loop.loss,
            evaluation_before=loop.evaluation_before,
            evaluation=loop.evaluation,
            tokens=loop.step * prepared.tokens_per_step,
            checkpoint=loop.saved or self.last_checkpoint(),
            model=model,
            failed_saves=loop.failed_saves,
            best=loop.best.loss if loop.best.step >= 0 else None,
            best_step=loop.best.step if loop.best.step >= 0 else None,
            best_model=directory.best if loop.best.kept_step >= 0 else None,
            stopped_early=loop.stopped_early,
            stopped_by=loop.stopped_by if stopped else 0,
        )

    def _record_saved(self) -> None:
        """Record that a checkpoint was complete; a start without one is refused from now on."""
        with suppress(InfinityError):  # retried with the next checkpoint
            self.directory.remember(saved=True)

    @property
    def kept(self) -> str:
        """Clause that names the state on disk to resume from."""
        if self.directory.record.get("durable"):
            return "the last committed step is on disk"
        return last_checkpoint_clause(self.directory.checkpoints)

    # --- resuming --------------------------------------------------------------------------------

    def _load_state(self, engine: Engine, reel: BatchIterator, prepared: Prepared) -> str:
        """Load the saved state and return a description of it; empty for a new run."""
        if self.checkpoint is not None:
            self._load_named(engine, self.checkpoint, reel, prepared)
            with self.ranks.collective_section("records its origin"):
                self.directory.remember(origin=str(self.checkpoint))
                if self.checkpoint.parent == self.directory.checkpoints:
                    # Later checkpoints are of steps that this start discards.
                    self.directory.write(f"checkpoints/{LATEST_NAME}", f"{self.checkpoint.name}\n")
            return f"{self.checkpoint}, with its optimizer and schedule unchanged"
        if self.resume != AUTO:
            return ""
        if self.state.left is not None:
            engine.load_checkpoint(self.state.left)
        has_state = engine.resumed or self.state.left is not None
        with self.ranks.collective_section("looks for a checkpoint"):
            last = self.last_checkpoint()
            if last is None and not has_state:
                last = self._unnamed_checkpoint()
            if last is not None:
                self._record_saved()
        done = reel.taken // prepared.windows_per_step
        if last is not None:
            number = last.name.removeprefix("step")
            # One of another name has no number to compare with the state.
            is_newer = int(number) > done if number.isdecimal() else not has_state
            if is_newer:
                engine.load_checkpoint(last.parent, last.name)
                return str(last)
        origin = self.directory.record.get("origin")
        if origin and last is None and not has_state:  # a start from a checkpoint that saved none
            self._load_named(engine, Path(origin), reel, prepared)
            return str(origin)
        return f"the committed step {done}" if has_state else ""

    def _load_named(
        self, engine: Engine, checkpoint: Path, reel: BatchIterator, prepared: Prepared
    ) -> None:
        """Load a named checkpoint; raise `ConfigError` if its settings differ."""
        configured = _hyperparameters(engine)
        client_state = engine.load_checkpoint(checkpoint.parent, checkpoint.name)[1] or {}
        loaded = _hyperparameters(engine)
        changed = [
            f"{name} is {loaded[name]!r} in the checkpoint, and {value!r} in this run"
            for name, value in configured.items()
            if loaded.get(name, value) != value
        ]
        step = reel.taken // prepared.windows_per_step
        if client_state.get("step", step) != step:
            changed.append(
                f"it is of step {client_state['step']}, which would be step {step} with the "
                f"{prepared.windows_per_step} windows of a step of this run"
            )
        if changed:
            raise ConfigError(
                f"cannot go on from {checkpoint} with other settings: {listed(changed, 4, '; ')}",
                because="its optimizer and its schedule are resumed unchanged",
                remedy="restore them; or begin a new run with its weights, model.path=...",
            )

    def _unnamed_checkpoint(self) -> Path | None:
        """Return the complete checkpoint of a run that was killed before it wrote `latest`.

        None for a run that never had a checkpoint: it begins again, and `Metrics` notes that.
        Raises `CheckpointError` if there was one.
        """
        directory, num_recorded = self.directory, recorded_steps(self.directory.metrics)
        root = directory.checkpoints
        complete = checkpoints(root) if root.is_dir() else []
        if not directory.record.get("saved", num_recorded > 0) and not directory.is_complete:
            return root / complete[0].tag if complete else None
        problem = (
            f"{root} has no checkpoint" if not complete else f"{root / LATEST_NAME} is missing"
        )
        raise CheckpointError(
            f"{problem}, but {num_recorded} steps were done in {directory.path}",
            because="it was moved or removed, or is not mounted",
            remedy=f"--resume {root / complete[0].tag}"
            if complete
            else "restore it; a new run needs another run_dir=...",
        )

    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint that `latest` names; raise `CheckpointError` or `MachineError`."""
        tag = find_tag(self.directory.checkpoints, None)
        return None if tag is None else self.directory.checkpoints / tag

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Close files, unlock the directory, and close `ranks`; idempotent."""
        self.directory.close()
        if not self._engine_owns_ranks:
            self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def _rank_0_first(ranks: DistContext, progress: Progress | None) -> Iterator[Progress | None]:
    """Context whose body rank 0 runs first, and the other ranks afterwards, with its results.

    Yields the progress callback. On rank 0 it also synchronizes with the waiting ranks, before
    their timeout.
    """
    doing, reported_s = "prepares tokens", time.monotonic()

    def report(done_bytes: int, total_bytes: int, what: str) -> None:
        nonlocal reported_s
        if progress is not None:
            progress(done_bytes, total_bytes, what)
        if time.monotonic() - reported_s > _SIGNAL_INTERVAL_S:
            ranks.synchronize(doing, 1)
            reported_s = time.monotonic()

    while ranks.rank and ranks.synchronize(doing, 0)[0][0]:
        pass
    yield progress if ranks.rank or ranks.count == 1 else report
    if not ranks.rank:
        ranks.synchronize(doing, 0)


def _hyperparameters(engine: Engine) -> dict[str, Any]:
    """Return the hyperparameters of the optimizer's groups by name, without scheduled ones."""
    values: dict[str, Any] = {}
    for number, group in enumerate(engine.optimizer.param_groups):
        for name, value in group.items():
            scheduled = engine.lr_scheduler is not None and name in ("lr", "betas", "momentum")
            if name == "initial_lr":
                name = "lr"
            elif name in ("params", "param_names") or scheduled:
                continue
            plain_value = list(map(float, value)) if isinstance(value, list | tuple) else value
            values[f"{name} of group {number}" if number else name] = plain_value
    return values


def _find_checkpoint(path: Path) -> Path:
    """Return a checkpoint, given its path, its root, or the directory of its run."""
    path = path.expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"--resume {path}: there is no such directory",
            remedy="--resume auto, or a directory below checkpoints/ of a run",
        )
    for root in (path, path / "checkpoints"):
        tag = find_tag(root, None)
        if tag is not None:
            return root / tag
    if not any(name.endswith(".json") for name in os.listdir(path)):
        raise CheckpointError(f"--resume {path}: there is no checkpoint")
    return path


# --- failures of the drive that holds the state --------------------------------------------------


def elsewhere(error: InfinityError, run: Run, command: Sequence[str]) -> InfinityError:
    """Return the error to raise for `error` of a closed run.

    If the drive of the state failed, that is an error with commands to continue on another drive.
    `command` is the command line without --resume.
    """
    if removed := next((e for e in _causes(error) if isinstance(e, RemovedError)), None):
        return removed  # not a failure of the drive
    state_failure = _state_failure(error, run)
    if state_failure is None:
        return error
    failure, drive = state_failure
    copies, overrides = [], []
    if _same_drive(run.directory.path, drive):
        copies.append(run.directory.path)
        overrides.append(f"run_dir={OTHER_DRIVE / run.directory.path.name}")
    checkpoint = latest(run.directory.checkpoints)
    recovery = f"{checkpoint} is complete" if checkpoint else "there is no checkpoint to go on from"
    last_update, durable = _last_committed_update(run), run.config.engine.durable
    other_paths = [path for path in run.config.engine.nvme_path if path != drive]
    if durable and last_update is None:
        other_paths = []  # they hold stripes of the lost state
    if last_update is not None:
        state = drive / run.state.name
        copies.append(state)
        alternative = "there is no checkpoint to go on from instead"
        if checkpoint is not None:
            restart = [*command, f"engine.nvme_path={OTHER_DRIVE}", "--resume", str(checkpoint)]
            alternative = (
                f"if it cannot be copied, `{shlex.join(restart)}` goes on from that checkpoint"
            )
        recovery = f"the commit of update {last_update} in {state} is complete; {alternative}"
    paths = ",".join(map(str, [OTHER_DRIVE, *other_paths]))
    overrides.append(f"engine.nvme_path={f'[{paths}]' if other_paths else paths}")
    commands = [["cp", "-a", *map(str, copies), f"{OTHER_DRIVE}/"]] if copies else []
    # With durable steps, auto refuses to resume without the state.
    resume = str(checkpoint) if durable and last_update is None and checkpoint else "auto"
    commands.append([*command, *overrides, "--resume", resume])
    local_remedy = f"; or, to stay: {failure.remedy}" if failure.remedy else ""
    return MachineError(
        f"the drive of {drive}, which holds the state of this run, fails: {failure.what}",
        because="; ".join(part for part in (failure.because, recovery) if part),
        remedy=" && ".join(map(shlex.join, commands))
        + f"  (with a directory of yours for {OTHER_DRIVE}){local_remedy}",
    )


def _state_failure(error: BaseException, run: Run) -> tuple[MachineError, Path] | None:
    """Return the cause of `error` that names a file of the state, and its nvme_path."""
    for cause in _causes(error):
        is_transfer = isinstance(cause, TransferError)
        if isinstance(cause, MachineError) and (is_transfer or run.trains):
            text = cause.path if isinstance(cause, TransferError) else cause.what
            for path in run.config.engine.nvme_path:
                if f"{path}/" in text and f"{run.directory.path}/" not in text:
                    return cause, path
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _last_committed_update(run: Run) -> int | None:
    """Return the number of the last committed update; None if none can be read."""
    states = [path / run.state.name for path in run.config.engine.nvme_path]
    steps = []
    with suppress(InfinityError, OSError):
        for directory in rank_directories(states[:1]) if run.config.engine.durable else ():
            steps += [
                read_run(d, rank_directories(states)).record.step
                for d in durable_records(directory)
            ]
    return min(steps, default=None)  # some ranks may have prepared one more


def _same_drive(first: Path, second: Path) -> bool:
    try:
        return os.stat(first).st_dev == os.stat(second).st_dev
    except OSError:
        return False
