"""Run the tests with other versions of Python and torch, and print a table of results.

    make test-matrix ARGS='python3.12:2.11.0 python3.13:2.15.0 --markdown matrix.md -- tests/parity'

A cell is an interpreter and a torch version, installed by pip. Each gets a clone of the committed
sources and a separate venv in build/matrix (5 GB with a CUDA build; removed afterwards), where
`make test` runs with the arguments after `--`. Without cells: every interpreter found with the
newest torch, and the first of them with each torch. Not for CI: takes hours, and 5 GB of downloads
per cell.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.12", "python3.11", "python3.13", "python3.14")
TORCHES = ("2.15.0", "2.14.1", "2.13.0", "2.12.1", "2.11.0", "2.10.0")
SUMMARY = re.compile(r"^(?=.*\d+ (?:passed|failed|error)).* in [\d.]+s.*$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """An interpreter, by name or path, and a version of torch."""

    python: str
    torch: str

    @property
    def folder(self) -> Path:
        """Folder of the clone and its venv."""
        return REPOSITORY / "build" / "matrix" / f"{Path(self.python).name}-torch{self.torch}"


def default_cells() -> list[Cell]:
    """Return all usable interpreters with the newest torch, and one of them with each torch."""
    pythons = [name for name in PYTHONS if starts(name)]
    cells = [Cell(name, TORCHES[0]) for name in pythons]
    return cells + [Cell(pythons[0], version) for version in TORCHES[1:]] if pythons else []


def starts(python: str) -> bool:
    """Return True if the interpreter runs; a pyenv shim may exist without one."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def run(cell: Cell, tests: list[str], log: Path) -> str:
    """Clone, set up and test; return the summary line of pytest, or the failure."""
    shutil.rmtree(cell.folder, ignore_errors=True)
    variables = [f"PYTHON={cell.python}", f"TORCH={cell.torch}"]
    steps = (
        (REPOSITORY, ["git", "clone", "-q", str(REPOSITORY), str(cell.folder)]),
        (cell.folder, ["make", "setup", *variables]),
        (cell.folder, ["make", "test", *variables, f"ARGS={' '.join(tests)}"]),
    )
    with log.open("w") as file:
        for folder, command in steps:
            completed = subprocess.run(command, cwd=folder, stdout=file, stderr=file, check=False)
            if completed.returncode and command[1] != "test":
                return f"not set up, see {log}"
    summaries = SUMMARY.findall(log.read_text(errors="replace"))
    return summaries[-1].strip("= ") if summaries else f"no test ran, see {log}"


def versions(cell: Cell) -> str:
    """Return the versions of Python and torch in the venv of a cell."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python = cell.folder / ".venv" / "bin" / "python"
    try:
        return subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def main() -> int:
    """Run the cells, print a line for each, and write the table."""
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="PYTHON:TORCH")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--keep", action="store_true", help="leave the venvs where they are")
    arguments = parser.parse_args(sys.argv[1:split])
    tests = sys.argv[split + 1 :]
    cells = [Cell(*cell.rsplit(":", 1)) for cell in arguments.cells] or default_cells()
    rows = ["| Python, torch | asked for | tests | minutes |", "| --- | --- | --- | --- |"]
    (REPOSITORY / "build").mkdir(exist_ok=True)
    all_passed = bool(cells)
    for cell in cells:
        start = time.monotonic()
        log = REPOSITORY / "build" / f"matrix-{cell.folder.name}.log"
        result = run(cell, tests, log)
        all_passed &= "failed" not in result and "error" not in result and " passed" in result
        minutes = (time.monotonic() - start) / 60
        requested = f"{cell.python}, torch {cell.torch}"
        rows.append(f"| {versions(cell)} | {requested} | {result} | {minutes:.0f} |")
        print(rows[-1], flush=True)
        if not arguments.keep:
            shutil.rmtree(cell.folder, ignore_errors=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(rows) + "\n")
    return 0 if all_passed else 1


if __name__ == "__main__":
    os.environ.pop("MAKEFLAGS", None)  # do not pass flags to the inner make
    sys.exit(main())
