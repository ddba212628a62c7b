"""What `gpu_check.sh` runs: looks what is there, builds, runs checks, and writes a report."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _gpu_stages import STAGES, Check, checks_of
from _gpu_targets import table

REPOSITORY = Path(__file__).resolve().parent.parent
FACTS_S = 30.0
BUILT = REPOSITORY / "build" / "gpu_site"  # git ignores it: kept on the machine between calls
# What the built package is made of.
SOURCES = ("infinity", "csrc", "CMakeLists.txt", "pyproject.toml", ".whl")
LIMIT_S = 560.0  # of everything: a stage ends within ten minutes, wherever it runs
SHOWN_LINES = 60  # of a check's output in the report
GRACE_S = 10.0  # to clean up in
MISSING, NO_GPU, STOPPED = 3, 4, 124
# What building and testing need beside what pyproject.toml says.
TOOLS = ("packaging", "pip", "cmake", "ninja", "pytest", "pytest-timeout")
FACTS = """
import os, shutil, torch
from infinity.optim import cuda, nvrtc
device = torch.device("cuda", 0)
free, total = torch.cuda.mem_get_info(device)
print(torch.cuda.get_device_name(device), f"{total / 2**30:.0f} GiB,", os.cpu_count(), "CPU cores")
ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
disk = shutil.disk_usage(".").free
told = dict(line.split(":") for line in open("/proc/meminfo"))
free = int(told["MemAvailable"].split()[0]) * 1024
ram, free, disk = (f"{nbytes / 2**30:.0f} GiB" for nbytes in (ram, free, disk))
print(f"{ram} of RAM, {free} available, {disk} free on the disk")
print("torch", torch.__version__, "CUDA", torch.version.cuda)
print("kernels:", cuda.why_not(device) or f"NVRTC {nvrtc.version()}, source in {nvrtc.folder()}")
"""


@dataclass(frozen=True)
class Result:
    """How a check went; `code` is None where there was no time for it."""

    check: Check
    code: int | None
    seconds: float
    output: str


def missing(pyproject: Path) -> list[str]:
    """Requirements that are not met here: to build, to import, to compute on CUDA and to test."""
    from packaging.requirements import Requirement

    with pyproject.open("rb") as file:
        told = tomllib.load(file)
    project = told["project"]
    wanted = [*told["build-system"]["requires"], *project["dependencies"]]
    wanted += [*project["optional-dependencies"]["cuda"], *TOOLS]
    found = []
    for requirement in map(Requirement, wanted):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement}: not there")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement}: {version} is there")
    return found


def why_no_gpu() -> str | None:
    """Why nothing can be checked here; None if torch sees a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
    return f"torch {torch.__version__} ({built}) sees no CUDA device"


def build(site: Path) -> list[Check]:
    """Install carried wheels, and this repository, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    wheels = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob(".whl/*.whl"))
    found = [Check("wheels", 15, [*pip, *wheels])] if wheels else []
    return [*found, Check("build", 130, [*pip, "--no-build-isolation", "."])]


def fingerprint() -> str:
    """Changes with whatever the package is built from, and with the interpreter."""
    found = hashlib.sha256(sys.version.encode())
    for name in SOURCES:
        top = REPOSITORY / name
        files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for path in files:
            if "__pycache__" not in path.parts and path.suffix != ".so":
                found.update(str(path.relative_to(REPOSITORY)).encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def keep_traces(work: Path, out: Path) -> None:
    """Traces of megabytes, in less room: the drawings are there already."""
    for path in sorted(work.glob("*/trace-*.json")):
        with gzip.open(out / f"{path.parent.name}.trace.json.gz", "wb") as kept:
            kept.write(path.read_bytes())


def reports_in(work: Path, checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """What benchmarks said, by the name of the check; one that was stopped said nothing."""
    found = {}
    for check in checks:
        path = work / f"{check.name}.json"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.strip():
            found[check.name] = json.loads(text)
    return found


def show_table(paths: Sequence[str]) -> int:
    """The table of several runs' results together."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        found |= json.loads(Path(path).read_text(encoding="utf-8"))
    print("\n".join(table(found)))
    return 0


def run(check: Check, limit_s: float, out: Path, work: Path) -> Result:
    """Run one check for at most `limit_s` seconds; its output goes to the log, and is shown."""
    began = time.monotonic()
    print(f"== {check.name}: {' '.join(check.command)}", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as told:
        kept = (work / f"{check.name}.json").open("w") if check.json else told
        process = subprocess.Popen(check.command, cwd=REPOSITORY, stdout=kept, stderr=told)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = STOPPED
            # Interrupted, pytest says what has failed so far; a benchmark takes its children along.
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                process.send_signal(signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S / 2)
                    break
            process.wait()
        if kept is not told:
            kept.close()
        told.seek(0)
        output = told.read()
    seconds = time.monotonic() - began
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"== {check.name}: exit code {code} after {seconds:.0f} s\n{output}\n")
    print(output + f"== {check.name}: exit code {code} after {seconds:.0f} s", flush=True)
    return Result(check, code, seconds, output)


def run_all(checks: Sequence[Check], out: Path, work: Path, until: float) -> list[Result]:
    """One after the other; one that fails does not hide what comes after it."""
    results = []
    for check in checks:
        left = until - time.monotonic()
        if left < 5:
            results.append(Result(check, None, 0.0, ""))
        else:
            results.append(run(check, min(check.limit_s, left), out, work))
    return results


def write_report(
    results: Sequence[Result],
    facts: str,
    stages: Sequence[str],
    out: Path,
    reports: dict[str, dict[str, Any]],
) -> Path:
    """A page for docs/benchmarks: the machine, targets, checks, and what each check said last."""
    today = datetime.now(UTC)
    machine = facts.partition("\n")[0].strip() or "unknown machine"
    slug = re.sub(r"[^a-z0-9]+", "-", machine.partition(" GiB")[0].lower()).strip("-")
    lines = [
        f"# GPU check ({', '.join(stages)}): {machine}, {today:%Y-%m-%d}",
        "",
        f"    tools/gpu_check.sh {' '.join(stages)}",
        "",
        f"Commit {_commit()}, Python {platform.python_version()}, {today:%H:%M} UTC.",
        "",
        *(f"- {line}" for line in facts.splitlines()),
        "",
        *table(reports),
        "",
        "| check | result | seconds |",
        "| --- | --- | --- |",
        *(f"| {r.check.name} | {_outcome(r)} | {r.seconds:.0f} |" for r in results),
    ]
    for result in results:
        shown = result.output.rstrip().splitlines()[-SHOWN_LINES:]
        command = " ".join(result.check.command).replace(sys.executable, "python")
        lines += ["", f"## {result.check.name}", "", f"    {command}", "", "```", *shown, "```"]
    path = out / f"gpu_{'-'.join(stages)}_{slug}_{today:%Y-%m-%d}.md"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, cwd=REPOSITORY, text=True).strip()
    return "unknown"


def _outcome(result: Result) -> str:
    if result.code is None:
        return "not run: no time was left"
    if result.code == STOPPED:
        return f"stopped after {result.seconds:.0f} s"
    return "passed" if result.code == 0 else f"FAILED, exit code {result.code}"


def describe(checks: Sequence[Check]) -> None:
    """Print what would run."""
    for check in checks:
        command = " ".join(check.command).replace(sys.executable, "python")
        print(f"{check.name} (at most {check.limit_s:.0f} s): {command}")
    total = sum(check.limit_s for check in checks)
    print(f"in all at most {total:.0f} s")
    if total > LIMIT_S:
        print(f"after {LIMIT_S:.0f} s what is left is not run: better one stage at a time")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--dry-run", action="store_true", help="run nothing")
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="of results.json of several runs"
    )
    options = parser.parse_args(arguments)
    if options.table:
        return show_table(options.table)
    stages = options.stages or ["quick"]
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(STAGES)}")
    until = time.monotonic() + LIMIT_S
    out = Path(os.environ.get("OUT") or REPOSITORY / "build" / "gpu_check").resolve()
    if no_gpu := why_no_gpu():
        print(f"gpu_check: {no_gpu}", file=sys.stderr)
        if not options.dry_run:
            print("gpu_check: nothing was built, run or reported", file=sys.stderr)
            return NO_GPU
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        site = BUILT / fingerprint()
        checks = checks_of(stages, out, work)
        building = [] if (site / "done").exists() else build(site)
        if options.dry_run:
            for line in missing(REPOSITORY / "pyproject.toml"):
                print(f"missing, unless it lies in .whl/: {line}")
            describe([*building, *checks])
            return 0
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_text("")
        os.environ["PYTHONUNBUFFERED"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(site), os.environ.get("PYTHONPATH")])
        )
        if building:
            shutil.rmtree(BUILT, ignore_errors=True)
        results = run_all(building[:-1], out, work, until)
        sys.path.insert(0, str(site))
        if lacking := missing(REPOSITORY / "pyproject.toml"):
            lacking = [f"missing: {line}" for line in lacking]
            lacking.append("bring it with tools/gpu_check.sh --fetch")
            print("\n".join(f"gpu_check: {line}" for line in lacking), file=sys.stderr)
            write_report(results, "\n".join(["unknown machine", *lacking]), stages, out, {})
            return MISSING
        results += run_all(building[-1:], out, work, until)
        facts = ""
        if all(result.code == 0 for result in results):
            site.mkdir(parents=True, exist_ok=True)
            (site / "done").touch()
            looking = Check("facts", FACTS_S, [sys.executable, "-P", "-c", FACTS])
            found = run(looking, FACTS_S, out, work)
            facts = found.output if found.code == 0 else ""
            results.append(found)
            for check in checks:  # whatever happens to the machine, the last report is there
                results += run_all([check], out, work, until)
                reports = reports_in(work, checks)
                write_report(results, facts, stages, out, reports)
        reports = reports_in(work, checks)
        (out / "results.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
        keep_traces(work, out)
        report = write_report(results, facts, stages, out, reports)
    print("\n".join(table(reports)))
    print(f"report: {report}")
    return 0 if all(result.code == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
