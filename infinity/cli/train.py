"""`infinity train`: fine-tune or pretrain a causal language model from a configuration."""

from __future__ import annotations

import io
import json
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli.terminal import Stopped, command, say, stdout_is_ours
from infinity.errors import DoesNotFitError, EngineFailedError, MachineError

if TYPE_CHECKING:
    from infinity.cli.train_page import TrainPage
    from infinity.runs.metrics import Result
    from infinity.runs.run import Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(
    config: Annotated[
        Path, typer.Argument(help="YAML or JSON; `infinity init` writes one.", show_default=False)
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
            help="Go on with what the run's directory holds (begin where there is nothing), "
            "or with this checkpoint.",
        ),
    ] = "never",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout at the end, all else stderr.")
    ] = False,
) -> None:
    """Train a causal language model of transformers, new or pretrained, on local text.

    Shows the plan before anything is allocated. Writes to run_dir: config.yaml, plan.txt,
    plan.json, metrics.jsonl, checkpoints/, and at the end model/, which transformers loads.
    Ctrl-C finishes the step, saves, and stops; a second one stops at once.

    Exits with 0 when done, 2 for a configuration that makes no sense, 3 if the run does not fit,
    130 or 143 when it was stopped.
    """
    with command():
        if as_json:
            with stdout_is_ours(), redirect_stdout(sys.stderr):
                result = _train(config, overrides or [], resume)
            print(json.dumps(result.as_dict()), flush=True)
        else:
            result = _train(config, overrides or [], resume)


def _train(config: Path, overrides: list[str], resume: str) -> Result:
    from infinity.runs.settings import load_run_config

    settings = load_run_config(config, overrides)  # quick, without torch's import
    from infinity.cli.train_page import TrainPage
    from infinity.runs.run import Run

    page = TrainPage()
    typed = ["infinity", "train", str(config), *overrides]
    again = shlex.join([*typed, "--resume", "auto"])
    with _warnings_as_notes(page), page, Run(settings, resume) as run:
        try:
            prepared = run.prepare(page.progress)
            page.question(prepared)
            if not run.continues_state:
                _show_plan(run, page)
            with _Signals(page):
                result = run.train(page, page.progress)
        except Stopped as stopped:
            begun = run.directory.has_run
            stopped.text = stopped.text.partition(";")[0] + (
                f"; go on from the last checkpoint with: {again}" if begun else ""
            )
            raise
        except (MachineError, EngineFailedError) as error:
            from infinity.runs.rescue import elsewhere

            raise elsewhere(error, run, typed) if run.directory.has_run else error from None
        page.closing(result, run.directory.path)
    if result.stopped:
        say(f"stopped after step {result.steps} of {result.num_steps}; go on with: {again}")
        raise typer.Exit(128 + page.signum)
    return result


def _show_plan(run: Run, page: TrainPage) -> None:
    """Plan for what is there now, keep it and show it; ends the command where it does not fit."""
    from infinity.cli.plan import DEFAULT_ENDURANCE
    from infinity.cli.plan_page import report, show_plan
    from infinity.runs.model import model_on_meta
    from infinity.runs.preparation import case_of
    from infinity.sizes import parse_size
    from infinity.storage.cuda import find_device

    assert run.prepared is not None
    model = model_on_meta(run.config.model, run.prepared.facts)
    with closing(find_device(None)) as device:
        case, target, cut = case_of(run.prepared, model, device)
        found = report(case, target, cut, parse_size(DEFAULT_ENDURANCE))
    text = io.StringIO()
    with redirect_stdout(text):
        show_plan(found)
    run.directory.write("plan.txt", text.getvalue())
    run.directory.write("plan.json", json.dumps(found, indent=1))
    page.pause()
    show_plan(found)
    if not found["fits"]:
        raise typer.Exit(DoesNotFitError.exit_code)


@contextmanager
def _warnings_as_notes(page: TrainPage) -> Iterator[None]:
    """What the library warns of is a line among the others, said once."""
    said: set[str] = set()

    def show(message: Warning | str, *more: Any, **details: Any) -> None:
        text = str(message)
        if text not in said:
            said.add(text)
            page.note(text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class _Signals:
    """While training: the first signal asks for a stop between steps, the second stops at once."""

    defers = True  # see [Note: Ctrl-C] in `offload/owner.py`

    def __init__(self, page: TrainPage) -> None:
        self._page = page
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for signum in _SIGNALS:
            self._before[signum] = signal.signal(signum, self)

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._count += 1
        if self._count == 1 and self._page.begun:
            self._page.ask_to_stop(signum)
        elif self._count <= 2:
            self._count = 3  # cleaning up must not be interrupted
            raise Stopped(signum)
