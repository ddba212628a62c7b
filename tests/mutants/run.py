"""Seeds the bugs of mutants.toml one at a time in a copy of the tree, and asks the tests.

    python tests/mutants/run.py [NAME...] [--jobs N] [--tests-from REV] [--whole] [--table FILE]

A suite that passes with a bug in the product does not test what the bug breaks. The checkout is
never changed: each job has a copy under build/mutants, kept between runs so that native parts are
built once. Exit code 0: all were caught; 1: some were not; 2: the question makes no sense.
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
LIMIT_S, CLEAN_LIMIT_S, WHOLE_LIMIT_S = 300.0, 3600.0, 7200.0
MARKS, SUITE = "not big and not clock", ["-n", "2", "tests"]  # what `make test` runs
RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Mutant:
    """One seeded bug, and the tests that are to notice it, cheapest first."""

    name: str
    room: str
    kind: str
    file: str
    was: str
    becomes: str
    tests: list[str]

    @property
    def native(self) -> bool:
        """Whether something has to be built, or installed, before it has an effect."""
        return self.file.startswith("csrc/")


@dataclass(frozen=True)
class Answer:
    """What pytest said; `caught_by` is empty where it passed."""

    caught_by: str
    seconds: float
    failed: list[str] = field(default_factory=list)


class SenselessError(Exception):
    """The question cannot be asked like this."""


def read_mutants() -> list[Mutant]:
    """All entries, each of which fits the checkout."""
    with open(HERE / "mutants.toml", "rb") as file:
        mutants = [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.was) if path.is_file() else 0
        if count != 1:
            raise SenselessError(f"{mutant.name}: {mutant.was!r} is {count} times in {mutant.file}")
        if mutant.was == mutant.becomes or names.count(mutant.name) != 1:
            raise SenselessError(f"{mutant.name}: it changes nothing, or its name is taken")
    return mutants


def run(command: list[str], cwd: Path, log: Path, limit_s: float = 1800.0) -> int | None:
    """The exit status, None past the limit; children of children end with it."""
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
    """Kill what is left of a process's session: it may have left children behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class Copy:
    """A copy of the tree with an environment of its own."""

    def __init__(self, job: int, tests_from: str | None) -> None:
        self.root = ROOT / "build/mutants" / str(job)
        self.python = self.root / ".venv/bin/python"
        self.log = self.root.with_name(f"{job}.log")
        self.root.mkdir(parents=True, exist_ok=True)
        self._stale = True  # what is installed is not what the sources say
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
        for name, data in wanted.items():  # what is the same keeps its time: less is built
            path = self.root / name
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            path.chmod((ROOT / name).stat().st_mode if (ROOT / name).exists() else 0o644)

    def _make_environment(self) -> None:
        """Path lines in .pth files are not read for further .pth files: that is the trick.

        So the checkout's packages are seen, and its own editable install is not.
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
                raise SenselessError(f"it does not build:\n{self.log.read_text()[-3000:]}")
        self._stale = False

    def _write(self, mutant: Mutant, text: str) -> None:
        path = self.root / mutant.file
        path.write_text(text)
        # Python compares seconds and sizes only, so it might go on with what it compiled before.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        self._stale |= mutant.native

    def ask(self, tests: list[str], limit_s: float, *options: str) -> Answer:
        """Run tests on the copy as it is."""
        self._install()
        started = time.monotonic()
        pytest = [str(self.python), "-m", "pytest", "-q", "-m", MARKS, "-p", "no:cacheprovider"]
        tmp = self.root / "build/tmp"
        status = run([*pytest, f"--basetemp={tmp}", *options, *tests], self.root, self.log, limit_s)
        shutil.rmtree(tmp, ignore_errors=True)
        seconds, said = time.monotonic() - started, self.log.read_text(errors="replace")
        if status == 0:
            return Answer("", seconds)
        if status in (4, 5):
            raise SenselessError(f"pytest found no such tests: {' '.join(tests)}\n{said[-2000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        by = failed[0] if failed else f"{tests[0]} (status {status})"
        hangs = status is None or "Failed: Timeout" in said or "+ Timeout +" in said
        return Answer(f"{by} (hangs)" if hangs else by, seconds, failed)

    def try_out(self, mutant: Mutant, *, whole: bool) -> Answer:
        """Apply, ask, restore."""
        text = (self.root / mutant.file).read_text()
        self._write(mutant, text.replace(mutant.was, mutant.becomes))
        try:
            answer = Answer("", 0.0)
            if tests := self.known(mutant.tests):
                answer = self.ask(tests, LIMIT_S, "-x", f"--timeout={LIMIT_S / 2:g}")
            if whole and not answer.caught_by:
                all_of_it = self.ask(SUITE, WHOLE_LIMIT_S, "-x", f"--timeout={LIMIT_S:g}")
                answer = replace(all_of_it, seconds=answer.seconds + all_of_it.seconds)
            return answer
        finally:
            self._write(mutant, text)

    def known(self, tests: list[str]) -> list[str]:
        """Those of the tests that the copy has: another revision's suite may lack some."""
        found = []
        for test in tests:
            path, _, name = test.partition("::")
            file = self.root / path
            called = f"def {name.rpartition('::')[2]}("
            if file.is_dir() or (file.is_file() and (not name or called in file.read_text())):
                found.append(test)
        return found


def ask_all(mutants: list[Mutant], options: argparse.Namespace) -> dict[str, Answer]:
    """Every mutant's answer, told as it comes. Raises if tests fail without any bug."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    first = Copy(0, options.tests_from)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    tests, asked = first.known(tests), len(tests)
    if len(tests) < asked and not options.tests_from:
        missing = [m.name for m in mutants if first.known(m.tests) != m.tests]
        raise SenselessError(f"tests that are not there: {', '.join(missing)}")
    if tests:
        clean = first.ask(tests, CLEAN_LIMIT_S)
        if clean.caught_by:  # what passes by itself met a busy machine
            print(f"without a bug, asked once more: {', '.join(clean.failed)}", flush=True)
            again = first.ask(clean.failed, CLEAN_LIMIT_S) if clean.failed else clean
            if again.caught_by:
                raise SenselessError(f"without any bug {again.caught_by} fails, see {first.log}")
        print(f"without a bug {len(tests)} of {asked} selections pass ({clean.seconds:.0f} s)")
    copies.put(first)
    for job in range(1, min(options.jobs, len(mutants))):
        copies.put(Copy(job, options.tests_from))

    def one(mutant: Mutant) -> Answer:
        copy = copies.get()
        try:
            answer = copy.try_out(mutant, whole=options.whole)
        finally:
            copies.put(copy)
        by = f"caught by {answer.caught_by}" if answer.caught_by else "NOT CAUGHT"
        print(f"{mutant.name} [{mutant.room}]: {by} ({answer.seconds:.0f} s)", flush=True)
        return answer

    with ThreadPoolExecutor(options.jobs) as pool:
        return dict(zip([m.name for m in mutants], pool.map(one, mutants), strict=True))


def table(mutants: list[Mutant], answers: dict[str, Answer]) -> str:
    """All in Markdown."""
    rows = [["name", "room", "kind", "the line that is changed", "caught by"], ["---"] * 5]
    for m in mutants:
        change = f"{m.file}: `{m.was.strip()}` → `{m.becomes.strip()}`"
        by = answers[m.name].caught_by or "**not caught**"
        rows.append([c.replace("|", "\\|") for c in (m.name, m.room, m.kind, change, by)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="copies, and mutants at a time")
    parser.add_argument("--tests-from", metavar="REV", help="take tests/ of another revision")
    parser.add_argument("--whole", action="store_true", help="else ask all that `make test` runs")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the answers in Markdown")
    options = parser.parse_args()
    try:
        mutants = read_mutants()
        unknown = set(options.names) - {mutant.name for mutant in mutants}
        if unknown:
            raise SenselessError(f"no such mutants: {', '.join(sorted(unknown))}")
        mutants = [m for m in mutants if not options.names or m.name in options.names]
        answers = ask_all(mutants, options)
    except SenselessError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for process in list(RUNNING):
            end(process)
        os._exit(130)  # threads may wait for tests that are over
    if options.table:
        options.table.write_text(table(mutants, answers))
    caught = sum(bool(answer.caught_by) for answer in answers.values())
    print(f"{caught} of {len(mutants)} caught")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
