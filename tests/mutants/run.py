"""Apply the mutants of mutants.toml one at a time to a copy of the tree, and run the tests.

  python tests/mutants/run.py [NAME...] [--jobs N] [--tests-from REV] [--full-suite] [--table FILE]

A suite that passes with a mutant does not test what the mutant breaks. The checkout is never
changed: each job has a copy under build/mutants, kept between runs so that native extensions are
built once. Exit code 0: all were caught; 1: some were not; 2: usage or setup error.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv"
LIMIT_S, CLEAN_LIMIT_S, SUITE_LIMIT_S = 300.0, 3600.0, 7200.0
MARKS, SUITE = "not big and not clock", ["-n", "2", "tests"]  # what `make test` runs
RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Mutant:
    """A seeded bug, and the tests expected to catch it, cheapest first."""

    name: str
    package: str
    kind: str
    file: str
    was: str
    becomes: str
    tests: list[str]

    @property
    def is_native(self) -> bool:
        """Return True if an extension must be rebuilt for the mutant to have an effect."""
        return self.file.startswith("csrc/")


@dataclass(frozen=True)
class Result:
    """Result of a pytest run; `caught_by` is empty if it passed."""

    caught_by: str
    seconds: float
    failed: list[str] = field(default_factory=list)


class MutantError(Exception):
    """Invalid arguments, mutants or setup."""


def read_mutants() -> list[Mutant]:
    """Read all mutants and check that each applies to the checkout."""
    with open(HERE / "mutants.toml", "rb") as file:
        mutants = [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.was) if path.is_file() else 0
        if count != 1:
            raise MutantError(
                f"{mutant.name}: {mutant.was!r} occurs {count} times in {mutant.file}"
            )
        if mutant.was == mutant.becomes or names.count(mutant.name) != 1:
            raise MutantError(f"{mutant.name}: it changes nothing, or its name is not unique")
    return mutants


def existing_tests(tests: list[str], root: Path = ROOT) -> list[str]:
    """Return the tests that a tree has; the suite of another revision may lack some."""
    found = []
    for test in tests:
        path, _, name = test.partition("::")
        file = root / path
        definition = f"def {name.rpartition('::')[2]}("
        if file.is_dir() or (file.is_file() and (not name or definition in file.read_text())):
            found.append(test)
    return found


def run(command: list[str], cwd: Path, log: Path, limit_s: float = 1800.0) -> int | None:
    """Run a command in a session of its own; return its exit status, None after `limit_s`."""
    paths = [str(cwd / ".venv/bin"), str(VENV / "bin"), os.environ.get("PATH", os.defpath)]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {"PATH": os.pathsep.join(paths), "PYTHONUTF8": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True
        )
    RUNNING.add(process)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)
        RUNNING.discard(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of a process, with all its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class Copy:
    """Copy of the tree with its own virtual environment."""

    def __init__(self, job: int, tests_from: str | None) -> None:
        self.root = ROOT / "build/mutants" / str(job)
        self.python = self.root / ".venv/bin/python"
        self.log = self.root.with_name(f"{job}.log")
        self.root.mkdir(parents=True, exist_ok=True)
        self._stale = True  # the sources have changed since the last install
        self._sync(tests_from)
        self._make_environment()
        self._install()

    def _sync(self, tests_from: str | None) -> None:
        listed = subprocess.check_output(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True
        )
        names = [n for n in listed.split("\0") if n and (ROOT / n).is_file()]
        wanted = {name: (ROOT / name).read_bytes() for name in names}
        if tests_from:
            wanted = {n: b for n, b in wanted.items() if not n.startswith("tests/")}
            archive = subprocess.check_output(["git", "archive", tests_from, "tests"], cwd=ROOT)
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                wanted |= {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
        for path in [p for p in self.root.rglob("*") if p.is_file()]:
            inside = path.relative_to(self.root)
            if inside.parts[0] not in (".venv", "build") and inside.as_posix() not in wanted:
                path.unlink()
        for name, data in wanted.items():  # unchanged files keep their mtime: less is rebuilt
            path = self.root / name
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            path.chmod((ROOT / name).stat().st_mode if (ROOT / name).exists() else 0o644)

    def _make_environment(self) -> None:
        """Create a virtual environment that sees the packages installed for the checkout.

        .pth files in directories that are added by a .pth file are not processed, so the editable
        install of the checkout itself is not seen.
        """
        if not self.python.exists():
            venv = [str(VENV / "bin/python"), "-m", "venv", "--without-pip"]
            subprocess.run([*venv, str(self.root / ".venv")], check=True)
            (checkout,) = VENV.glob("lib/python*/site-packages")
            (inside,) = (self.root / ".venv").glob("lib/python*/site-packages")
            (inside / "checkout.pth").write_text(f"{checkout}\n")

    def _install(self) -> None:
        if self._stale:
            pip = [str(self.python), "-m", "pip", "install", "-q", "--no-build-isolation"]
            if run([*pip, "--no-deps", "-e", "."], self.root, self.log):
                raise MutantError(f"the build failed:\n{self.log.read_text()[-3000:]}")
        self._stale = False

    def _write(self, mutant: Mutant, text: str) -> None:
        path = self.root / mutant.file
        path.write_text(text)
        # Python compares only mtime seconds and sizes, so it might reuse stale bytecode.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        self._stale |= mutant.is_native

    def run_tests(self, tests: list[str], limit_s: float, *options: str) -> Result:
        """Run tests on the current state of the copy."""
        self._install()
        started = time.monotonic()
        pytest = [str(self.python), "-m", "pytest", "-q", "-m", MARKS, "-p", "no:cacheprovider"]
        tmp = self.root / "build/tmp"
        status = run([*pytest, f"--basetemp={tmp}", *options, *tests], self.root, self.log, limit_s)
        shutil.rmtree(tmp, ignore_errors=True)
        seconds, output = time.monotonic() - started, self.log.read_text(errors="replace")
        if status == 0:
            return Result("", seconds)
        if status in (4, 5):
            raise MutantError(f"pytest found no such tests: {' '.join(tests)}\n{output[-2000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        by = failed[0] if failed else f"{tests[0]} (status {status})"
        hangs = status is None or "Failed: Timeout" in output or "+ Timeout +" in output
        return Result(f"{by} (hangs)" if hangs else by, seconds, failed)

    def try_mutant(self, mutant: Mutant, *, full_suite: bool) -> Result:
        """Apply the mutant, run its tests, restore the file."""
        text = (self.root / mutant.file).read_text()
        self._write(mutant, text.replace(mutant.was, mutant.becomes))
        try:
            result = Result("", 0.0)
            if tests := existing_tests(mutant.tests, self.root):
                result = self.run_tests(tests, LIMIT_S, "-x", f"--timeout={LIMIT_S / 2:g}")
            if full_suite and not result.caught_by:
                suite_result = self.run_tests(SUITE, SUITE_LIMIT_S, "-x", f"--timeout={LIMIT_S:g}")
                result = replace(suite_result, seconds=result.seconds + suite_result.seconds)
            return result
        finally:
            self._write(mutant, text)


def try_all(mutants: list[Mutant], options: argparse.Namespace) -> dict[str, Result]:
    """Try all mutants and print each result. Raises if tests fail without any mutant."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    first = Copy(0, options.tests_from)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    tests, num_tests = existing_tests(tests, first.root), len(tests)
    if len(tests) < num_tests and not options.tests_from:
        missing = [m.name for m in mutants if existing_tests(m.tests, first.root) != m.tests]
        raise MutantError(f"missing tests of mutants: {', '.join(missing)}")
    if tests:
        clean = first.run_tests(tests, CLEAN_LIMIT_S)
        if clean.caught_by:  # rerun: a busy machine may cause spurious failures
            print(f"failed without a mutant, rerun: {', '.join(clean.failed)}", flush=True)
            rerun = first.run_tests(clean.failed, CLEAN_LIMIT_S) if clean.failed else clean
            if rerun.caught_by:
                raise MutantError(f"{rerun.caught_by} fails without a mutant, see {first.log}")
        print(
            f"{len(tests)} of {num_tests} selections pass without a mutant ({clean.seconds:.0f} s)"
        )
    copies.put(first)
    for job in range(1, min(options.jobs, len(mutants))):
        copies.put(Copy(job, options.tests_from))

    def run_one(mutant: Mutant) -> Result:
        copy = copies.get()
        try:
            result = copy.try_mutant(mutant, full_suite=options.full_suite)
        finally:
            copies.put(copy)
        by = f"caught by {result.caught_by}" if result.caught_by else "NOT CAUGHT"
        print(f"{mutant.name} [{mutant.package}]: {by} ({result.seconds:.0f} s)", flush=True)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        return dict(zip([m.name for m in mutants], pool.map(run_one, mutants), strict=True))


def table(mutants: list[Mutant], results: dict[str, Result]) -> str:
    """Return the results as a Markdown table."""
    rows = [["name", "package", "kind", "changed line", "caught by"], ["---"] * 5]
    for m in mutants:
        change = f"{m.file}: `{m.was.strip()}` → `{m.becomes.strip()}`"
        by = results[m.name].caught_by or "**not caught**"
        rows.append([c.replace("|", "\\|") for c in (m.name, m.package, m.kind, change, by)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these mutants")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent mutants")
    parser.add_argument("--tests-from", metavar="REV", help="take tests/ of another revision")
    parser.add_argument("--full-suite", action="store_true", help="else run all of `make test`")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results as Markdown")
    options = parser.parse_args()
    try:
        mutants = read_mutants()
        unknown = set(options.names) - {mutant.name for mutant in mutants}
        if unknown:
            raise MutantError(f"unknown mutants: {', '.join(sorted(unknown))}")
        mutants = [m for m in mutants if not options.names or m.name in options.names]
        results = try_all(mutants, options)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for process in list(RUNNING):
            end(process)
        os._exit(130)  # threads may wait for processes that were killed
    if options.table:
        options.table.write_text(table(mutants, results))
    caught = sum(bool(result.caught_by) for result in results.values())
    print(f"{caught} of {len(mutants)} caught")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
