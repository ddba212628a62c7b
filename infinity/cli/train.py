"""`infinity train`: train a causal language model, with progress on the terminal."""

from __future__ import annotations

import importlib
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli.terminal import (
    Page,
    ProgressLine,
    Stopped,
    command,
    handling,
    library_stdout_to_stderr,
    progress_bar_environment,
    show_warnings_with,
)
from infinity.common.sizes import format_count, format_duration
from infinity.errors import DoesNotFitError, EngineFailedError, InfinityError, MachineError

if TYPE_CHECKING:
    from infinity.distributed.context import DistContext
    from infinity.train.metrics import Result
    from infinity.train.preparation import Prepared
    from infinity.train.run import Run
    from infinity.train.settings import RunConfig

_FIRST_RANK_REPORTS_S = 30.0  # the report of a run takes seconds on a busy machine
_STALLS = {"disk_read": "read", "slot": "slots", "gradient": "gradients"}


def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML or JSON; `infinity init` writes one.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Values that win over the file's: engine.optimizer.lr=1e-4",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|PATH",
            help="auto: resume the run of the directory, or begin it; PATH: resume from this "
            "checkpoint.",
        ),
    ] = "never",
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            help="Start a process for each of N GPUs (without any, on the CPU), which share out "
            "every step; `torchrun ... -m infinity.cli train` does as well.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout at the end, all else stderr.")
    ] = False,
) -> None:
    """Train a causal language model of transformers, new or pretrained, on local text.

    Shows the plan before anything is allocated. Writes to run_dir: config.yaml, plan.txt,
    plan.json, metrics.jsonl, checkpoints/, and at the end model/, which transformers loads, and
    report.html (see `infinity report`).
    Ctrl-C finishes the step, saves, and stops; a second one stops at once. The steps are the same
    on any number of GPUs, and a run can be resumed on another number.

    Exits with 0 when done, 2 for a configuration that makes no sense, 3 if the run does not fit,
    130 or 143 if it was stopped.
    """
    with command():
        os.environ.update(progress_bar_environment())
        if gpus is not None and gpus > 1:
            from infinity.cli.launch import launch

            options = ["--resume", resume, *(["--json"] if as_json else [])]
            arguments = ["-m", "infinity.cli", "train", str(config), *(overrides or []), *options]
            remedy = "dmesg | tail; --resume auto goes on from the last checkpoint"
            launch(gpus, arguments, remedy=remedy)
        elif as_json:
            with library_stdout_to_stderr(), redirect_stdout(sys.stderr):
                result = _train(config, overrides or [], resume)
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(result.as_dict()), flush=True)
        else:
            _train(config, overrides or [], resume)


def _train(config: Path, overrides: list[str], resume: str) -> Result:
    from infinity.train.settings import load_run_config

    if os.environ.get("WORLD_SIZE", "1") == "1":
        return _train_on(None, load_run_config(config, overrides), config, overrides, resume)
    from infinity.distributed.context import is_propagated
    from infinity.distributed.launch import find_ranks

    ranks = find_ranks()
    try:
        with ranks.collective_section("reads the configuration"):
            settings = load_run_config(config, overrides)
        return _train_on(ranks, settings, config, overrides, resume)
    except (InfinityError, Stopped, typer.Exit) as error:
        if ranks.rank and (not isinstance(error, InfinityError) or is_propagated(error)):
            # The first rank prints the error. The launcher ends all ranks when one has ended: wait.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_FIRST_RANK_REPORTS_S)
            raise typer.Exit(error.exit_code) from None
        raise
    finally:
        ranks.close()  # threads of a process group that outlives Python abort the process


def _train_on(
    ranks: DistContext | None, settings: RunConfig, config: Path, overrides: list[str], resume: str
) -> Result:
    from infinity.train.run import Run  # imports torch, so only after the configuration was read

    if ranks is not None and ranks.rank:
        # transformers logs the same on the first rank.
        log: Any = importlib.import_module("transformers.utils.logging")
        log.set_verbosity_error()
        log.disable_progress_bar()
    page = TrainPage(quiet=ranks is not None and ranks.rank > 0)
    command_line = ["infinity", "train", str(config), *overrides]
    if ranks is not None:
        command_line += ["--gpus", str(ranks.count)]
    resume_command = shlex.join([*command_line, "--resume", "auto"])
    recorded_command = command_line if resume == "never" else [*command_line, "--resume", resume]
    with show_warnings_with(page.note), page, Run(settings, resume, ranks, recorded_command) as run:
        try:
            prepared = run.prepare(page.progress)
            page.question(prepared)
            if not run.resumes_state:
                _show_plan(run, page)
            with handling(_StopHandler(page)):
                result = run.train(page, page.progress)
        except Stopped as stopped:
            if run.directory.has_run:
                stopped.text += f"; {run.kept}; go on with: {resume_command}"
            raise
        except (MachineError, EngineFailedError) as error:
            from infinity.train.run import elsewhere

            raise elsewhere(error, run, command_line) if run.directory.has_run else error from None
        finally:
            if run.trains and not run.ranks.rank and run.directory.metrics.exists():
                page.report(run.directory.path)
        page.closing(result, run.directory.path)
    if result.stopped:
        signum = result.stopped_by or signal.SIGINT
        sender = (
            "" if signum == page.stopping else f" by {signal.Signals(signum).name} to another rank"
        )
        page.note(
            f"stopped after step {result.steps} of {result.num_steps}{sender}; "
            f"go on with: {resume_command}"
        )
        raise typer.Exit(128 + signum)
    return result


def _show_plan(run: Run, page: TrainPage) -> None:
    """Plan the run, write and show its plan; raise `typer.Exit` if it does not fit."""
    from infinity._initialize import device_for
    from infinity.cli.plan import DEFAULT_ENDURANCE
    from infinity.cli.plan_page import show_answer, show_plan, show_suggestions
    from infinity.cli.plan_report import report
    from infinity.cli.remedies import train_command_text
    from infinity.common.sizes import parse_size
    from infinity.storage.devices import resolve_device
    from infinity.train.preparation import case_of

    assert run.prepared is not None
    ranks, fits = run.ranks, True
    with ranks.collective_section("plans a run"):
        if not ranks.rank:
            with closing(resolve_device(device_for(None, ranks))) as device:
                case, target, partition = case_of(run.prepared, device, ranks)
                plan_data = report(
                    case,
                    target,
                    partition,
                    parse_size(DEFAULT_ENDURANCE),
                    run.chosen,
                    command_text=train_command_text(run.prepared.config, run.prepared.length),
                )
            text = io.StringIO()
            with redirect_stdout(text):
                show_plan(plan_data, verbose=True)
            run.directory.write("plan.txt", text.getvalue())
            run.directory.write("plan.json", json.dumps(plan_data, indent=1))
            page.pause()
            summary = Page()
            show_answer(summary, plan_data, no_disk="engine.nvme_path=DIR")
            if not plan_data["fits"]:
                show_suggestions(summary, plan_data)
            summary.entry("details", str(run.directory.path / "plan.txt"))
            fits = plan_data["fits"]
    if not ranks.all_gather_object(fits)[0]:
        raise typer.Exit(DoesNotFitError.exit_code)


class _StopHandler:
    """Signal handler of a training: the first signal stops after the step, the second at once."""

    defers = True  # see [Note: Ctrl-C] in `offload/sigint.py`

    def __init__(self, page: TrainPage) -> None:
        self._page = page
        self._count = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1 and self._page.begun:
            self._page.ask_to_stop(signum)
        elif self._count <= 2:
            self._count = 3  # cleanup must not be interrupted
            raise Stopped(signum)


# --- output --------------------------------------------------------------------------------------


class TrainPage(ProgressLine):
    """Display of one run; implements `infinity.train.metrics.TrainCallback`.

    `begun` is True once steps are run, `stopping` is the signal that requested a stop, or 0.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.begun = False
        self.stopping = 0

    # --- before training -------------------------------------------------------------------------

    def question(self, prepared: Prepared) -> None:
        """Print the data, steps and epochs of the run that will start."""
        corpus, windows = prepared.train.corpus, len(prepared.train)
        tokens = corpus.num_tokens
        conversations = f" in {corpus.num_documents:,} conversations" if corpus.marked else ""
        self.note(
            f"{prepared.facts.name}: {format_count(tokens)} tokens{conversations}, "
            f"{windows:,} windows of {prepared.length:,} to train on"
            + (f", {len(prepared.evaluate):,} held out" if prepared.evaluate is not None else "")
            + f"; {prepared.steps:,} steps of {prepared.tokens_per_step:,} tokens, "
            f"{prepared.steps * prepared.windows_per_step / windows:.3g} epochs"
        )
        for note in prepared.notes:
            self.note(note)

    # --- TrainCallback ---------------------------------------------------------------------------

    def begin(self, done: int, num_steps: int) -> None:
        """Start the progress of training."""
        self.pause()
        self.begun = True

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Show a step or a held-out loss."""
        step = record["step"]
        if record["event"] == "step":
            num_steps = record["num_steps"]
            line = format_step(record, self.columns)
            self.show(line, step, num_steps, edge=step in (1, num_steps))
        elif record["event"] == "evaluation":
            self.note(f"step {step}: held-out loss {record['loss']:.4f}")

    def ask_to_stop(self, signum: int) -> None:
        """Request a stop after this step; called by a signal handler."""
        self.stopping = signum
        name = signal.Signals(signum).name
        self.note(f"{name}: finishing this step, then saving; once more stops at once")

    # --- after training --------------------------------------------------------------------------

    def report(self, directory: Path) -> None:
        """Write the HTML page of the run; if that fails, print the reason."""
        from infinity.train.report.run import write_run_page

        self.pause()
        try:
            self.note(f"report: {write_run_page(directory)}")
        except InfinityError as error:
            self.note(f"no report.html: {error.what}; {error.remedy}; infinity report {directory}")

    def closing(self, result: Result, directory: Path) -> None:
        """Print the results of a completed training."""
        self.pause()
        if result.stopped or self._console.quiet:
            return
        rows = [["steps", f"{result.steps:,}"], ["tokens", f"{result.tokens:,}"]]
        if result.loss is not None:
            rows.append(["loss of the last step", f"{result.loss:.4f}"])
        if result.evaluation is not None:
            before = result.evaluation_before
            initially = "" if before is None else f" ({before:.4f} at the beginning)"
            rows.append(["held-out loss", f"{result.evaluation:.4f}{initially}"])
        if result.best is not None and result.best_step != result.steps:
            rows.append(["best of them", f"{result.best:.4f} at step {result.best_step}"])
        if result.best_model is not None:
            rows.append(["weights of the best", str(result.best_model)])
        if result.failed_saves:
            rows.append(["saves that failed", f"{result.failed_saves:,}"])
            rows.append(["last checkpoint", str(result.checkpoint)])
        if result.model is not None:
            rows.append(["model", str(result.model)])
            rows.append(["to try it", shlex.join(["infinity", "generate", str(directory), "..."])])
        with suppress(OSError):  # the terminal is closed
            Page().table(f"{directory}: done", ["", ""], rows)


def format_step(record: Mapping[str, Any], width: int = 1 << 20) -> str:
    """Return the line of a step, without waits, rate and speed if `width` columns are too few."""
    num_steps = record["num_steps"]
    waits = format_stalls(record["stall_s"], record["step_s"])
    parts = [
        f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
        "skipped: gradients are not finite" if record["skipped"] else "",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"waits: {waits}" if waits else "",
        f"ETA {format_duration(record['left_s'])}",
    ]
    for dropped in (None, 5, 3, 4):
        if dropped is not None:
            parts[dropped] = ""
        line = "  ".join(filter(None, parts))
        if len(line) <= width:
            break
    return line


def format_stalls(stall_s: Mapping[str, float], step_s: float) -> str:
    """Return the shares of a step that were spent waiting, by cause, the two largest first."""
    shares = {name: seconds / step_s for name, seconds in stall_s.items() if step_s > 0}
    largest = sorted(((s, name) for name, s in shares.items() if s >= 0.01), reverse=True)
    return ", ".join(f"{_STALLS.get(name, name)} {share:.0%}" for share, name in largest[:2])
