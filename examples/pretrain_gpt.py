#!/usr/bin/env python3
"""Train a GPT on the standard library's source code with its state on disk.

    python examples/pretrain_gpt.py --config examples/configs/demo.yaml --steps 30

Prints the plan, a line per step, the result, a comparison with plain PyTorch, and next commands.
Any CPU will do; the disk holds 16 bytes per parameter. The exit code is 0 on success, that of the
error with one message, 130 after Ctrl-C and 143 after SIGTERM; scratch files are always removed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from _process import Phase, Signals, Stopped

DEMO_CONFIG = Path(__file__).resolve().parent / "configs" / "demo.yaml"


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    started_at_s = time.perf_counter()
    signals = Signals()
    signals.install()
    arguments = _parser().parse_args(argv)
    if arguments.nvme_path is not None:
        arguments.nvme_path = arguments.nvme_path.expanduser()
    # Importing torch takes seconds; signals must be handled from the start.
    from _training import Run
    from _ui import Screen

    from infinity.errors import InfinityError

    try:
        signals.enter(Phase.RUNNING)
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            result = Run(arguments, Screen(), signals, started_at_s).run()
        if arguments.json:
            print(json.dumps(result), flush=True)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except InfinityError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout is gone; keep the interpreter from writing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signals.enter(Phase.ENDED)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


_positive.__name__ = "count"  # argparse shows it: invalid count value: 'x'


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, default=DEMO_CONFIG, help="YAML or JSON (default: the demo's)")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="override one value of the config; may be repeated")  # fmt: skip
    add("--nvme-path", type=Path, metavar="DIR", help="overrides nvme_path of the config")
    add("--model", default="gpt-100m", help="a preset of gpt.py (default: %(default)s)")
    add(
        "--context",
        type=_positive,
        default=64,
        metavar="N",
        help="tokens a sequence (default: %(default)s)",
    )
    add("--micro-batch", type=_positive, default=8, metavar="N",
        help="sequences per micro-batch (default: %(default)s)")  # fmt: skip
    add("--checkpointing", action="store_true", help="recompute blocks in backward: less memory")
    add("--steps", type=_positive, default=12, metavar="N", help="(default: %(default)s)")
    add("--eval-batches", type=_positive, default=2, metavar="N", help="held-out micro-batches")
    add("--text", type=Path, metavar="FILE", help="train on this file's bytes instead")
    add("--compare", action=argparse.BooleanOptionalAction, default=True,
        help="plain PyTorch, in RAM and a process of its own, takes turns at the end")  # fmt: skip
    add("--compare-steps", type=_positive, default=6, metavar="N", help="(default: %(default)s)")
    add("--json", action="store_true", help="one JSON object on stdout, the rest on stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
