"""Main program of `gpu_check.sh`: inspect the machine, build, run checks and write a report.

Without a GPU, print the commands, check that the carried wheels are complete, and print plans.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpu import wheels as carried
from gpu.smoke import memory_gib
from gpu.stages import STAGES, WHOLE_GIB, WHOLE_RAM_GIB, Check, checks_of
from gpu.targets import table
from gpu.wheels import REPOSITORY

FACTS_S = 60.0  # the first CUDA context of a fresh machine, and compiled kernels
BUILT = REPOSITORY / "build" / "gpu_site"  # ignored by git: persists on the machine between calls
BEGAN = time.monotonic()  # before the import of torch, which searches GPUs
LIMIT_S = 570.0  # default limit of a call: a stage ends within ten minutes
SHOWN_LINES = 60  # last lines of a check's output in the report
AWAY_GIB = 5.0  # RAM that may be missing at the start of a check, compared with the first
GRACE_S = 30.0  # for cleanup: unpinning a hundred GiB takes seconds
MISSING, NO_GPU, WARNED, STOPPED = 3, 4, 5, 124
LOADS = "import torch, infinity._adam, infinity._aio"
FACTS = """
import os, shutil, torch
from infinity.optim import cuda, cuda_compile
device = torch.device("cuda", 0)
free, total = torch.cuda.mem_get_info(device)
print(torch.cuda.get_device_name(device), f"{total / 2**30:.0f} GiB,", os.cpu_count(), "CPU cores")
ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
disk = shutil.disk_usage(".").free
meminfo = dict(line.split(":") for line in open("/proc/meminfo"))
free = int(meminfo["MemAvailable"].split()[0]) * 1024
ram, free, disk = (f"{nbytes / 2**30:.0f} GiB" for nbytes in (ram, free, disk))
print(f"{ram} of RAM, {free} available, {disk} free on the disk")
print("torch", torch.__version__, "CUDA", torch.version.cuda)
try:
    cuda.CudaKernels(device)
    print(f"kernels: NVRTC {cuda_compile.version()}, source in {cuda_compile.folder()}")
except Exception as error:
    print("kernels:", error)
    raise SystemExit(1)
"""


@dataclass(frozen=True)
class Result:
    """Result of a check. `code` is None if it was not run; `output` is the reason then."""

    check: Check
    code: int | None
    seconds: float
    output: str


def why_no_gpu() -> str | None:
    """Return the reason why torch sees no GPU; None if it sees one."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
    return f"torch {torch.__version__} ({built}) sees no CUDA device"


def install(site: Path, *packages: str) -> list[str]:
    """Return the command that installs wheels, or this repository, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    return [*pip, *packages]


def gpu_gib() -> float:
    """Return the GiB of the first GPU, without a context of this process, which takes memory."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return float(subprocess.check_output(query, text=True, timeout=20)) / 1024  # MiB
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def ram_gib(option_gib: float | None) -> float:
    """Return the GiB of RAM: the value of the option if set (RAM may grow), else the system's."""
    return option_gib or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def wait_for_ram(gib: float) -> None:
    """Wait until `gib` of RAM are available, at most `GRACE_S`: unpinning by the OS is slow."""
    until = time.monotonic() + GRACE_S
    while memory_gib()[1] < gib and time.monotonic() < until:
        time.sleep(0.5)


def wheels(site: Path) -> list[Check]:
    """Return the check that installs the carried wheels, without CUDA packages that exist."""
    installed = carried.OF_CUDA if carried.has_cuda_core() else ()
    paths = sorted(
        str(path) for path in carried.WHEELS.glob("*.whl") if carried.name_of(path) not in installed
    )
    return [Check("wheels", 30, install(site, *paths))] if paths else []


def build(site: Path) -> Check:
    return Check("build", 90, install(site, "--no-build-isolation", "."))


def built(site: Path, out: Path, work: Path, until: float) -> list[Result]:
    """Install infinity into a folder: the carried wheel, or a build if it is missing or fails."""
    wheel, results = carried.prebuilt(), list[Result]()
    if wheel is not None:
        install_wheel = Check("prebuilt", 15, install(site, str(wheel)))
        load_check = Check("loads", 30, [sys.executable, "-P", "-c", LOADS])
        results = run_all([install_wheel, load_check], out, work, until)
    if not results or any(result.code != 0 for result in results):
        results = run_all([build(site)], out, work, until)  # earlier results are in the log
    return results


def keep_traces(work: Path, out: Path) -> None:
    """Copy traces to `out`, compressed."""
    for path in sorted(work.glob("*/trace-*.json")):
        with gzip.open(out / f"{path.parent.name}.trace.json.gz", "wb") as file:
            file.write(path.read_bytes())


def reports_in(work: Path, checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Return the JSON reports of checks by name; a check that was stopped has none."""
    reports = {}
    for check in checks:
        path = work / f"{check.name}.json"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.strip():
            reports[check.name] = json.loads(text)
    return reports


def keep_results(work: Path, checks: Sequence[Check], out: Path) -> dict[str, dict[str, Any]]:
    """Return `reports_in`, and write it to results.json."""
    reports = reports_in(work, checks)
    (out / "results.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    return reports


def warnings_in(report: dict[str, Any]) -> list[str]:
    """Return the warnings of engines and retries of torch's allocator in a report.

    Without pinned memory every number is wrong; retries mean that the budget is too small.
    """
    contenders = report.get("contenders", {})
    facts = [report, *contenders.values()]
    messages = list(
        dict.fromkeys(text for report_facts in facts for text in report_facts.get("warnings", []))
    )
    for name, report_facts in contenders.items():
        if report_facts.get("alloc_retries"):
            messages.append(
                f"{name}: torch's allocator freed its cache and asked the driver again, "
                f"{report_facts['alloc_retries']} times: the device's budget is too small for its "
                "blocks"
            )
    return messages


def show_table(paths: Sequence[str]) -> int:
    """Print the table of the merged results of several runs; return the exit code."""
    results: dict[str, dict[str, Any]] = {}
    for path in paths:
        results |= json.loads(Path(path).read_text(encoding="utf-8"))
    print("\n".join(table(results)))
    return 0


def run(check: Check, limit_s: float, out: Path, work: Path) -> Result:
    """Run a check for at most `limit_s` seconds; print its output and append it to the log."""
    began = time.monotonic()
    print(f"== {check.name}: {' '.join(check.command)}", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as output_file:
        stdout = (work / f"{check.name}.json").open("w") if check.json else output_file
        process = subprocess.Popen(check.command, cwd=REPOSITORY, stdout=stdout, stderr=output_file)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = STOPPED
            # On SIGINT pytest reports the failures so far, and a benchmark ends its children.
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                process.send_signal(signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S / 2)
                    break
            process.wait()
        if stdout is not output_file:
            stdout.close()
        output_file.seek(0)
        output = output_file.read()
    if code == 0 and (warned := warnings_in(reports_in(work, [check]).get(check.name, {}))):
        code = WARNED
        output += "".join(f"the engine warned: {text}\n" for text in warned)
    seconds = time.monotonic() - began
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"== {check.name}: exit code {code} after {seconds:.0f} s\n{output}\n")
    print(output + f"== {check.name}: exit code {code} after {seconds:.0f} s", flush=True)
    return Result(check, code, seconds, output)


def run_all(
    checks: Sequence[Check], out: Path, work: Path, until: float, device_gib: float = WHOLE_GIB
) -> list[Result]:
    """Run checks in order until time `until`; a failure does not stop later ones."""
    results = []
    for check in checks:
        left = until - time.monotonic()
        if check.device_gib > device_gib:
            why = f"needs {check.device_gib:.0f} GiB on the GPU, which has {device_gib:.0f}"
            results.append(Result(check, None, 0.0, why))
        elif left < 5:
            results.append(Result(check, None, 0.0, "no time was left"))
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
    """Write a page for docs/benchmarks: machine, targets, checks and the end of their outputs."""
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
        *table(reports, found_only=True),
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
        return f"not run: {result.output}"
    if result.code == STOPPED:
        return f"stopped after {result.seconds:.0f} s"
    if result.code == WARNED:
        return "FAILED: the engine warned"
    return "passed" if result.code == 0 else f"FAILED, exit code {result.code}"


def describe(checks: Sequence[Check]) -> None:
    for check in checks:
        command = " ".join(check.command).replace(sys.executable, "python")
        command = re.sub(r"(\S+\.whl )+(\S+\.whl)", r".. \2", command)  # list only the last wheel
        print(f"{check.name} (at most {check.limit_s:.0f} s): {command}")
    total = sum(check.limit_s for check in checks)
    print(f"in all at most {total:.0f} s")
    if total > LIMIT_S:
        print(f"checks not started after {LIMIT_S:.0f} s are skipped: run one stage at a time")


def dry_run(checks: Sequence[Check], stages: Sequence[str], site: Path, out: Path) -> int:
    """Print the commands and the plans of `stages`.

    Returns:
        The exit code: `MISSING` if a wheel is missing or a plan does not fit the machine.
    """
    messages, problems = carried.state()
    print("\n".join(messages))
    describe([*wheels(site), build(site), *checks])
    try:
        from gpu.plan import plan_lines
        from infinity.errors import DoesNotFitError
    except ImportError as error:
        print(f"plans are not printed: the package is not built here: {error}")
        return MISSING if _print_problems(problems) else 0
    for stage in stages:
        try:
            print("\n".join(plan_lines(checks_of([stage], out, out))) or f"{stage}: plans nothing")
        except DoesNotFitError as error:
            problems.append(f"{stage}: {error}")
    return MISSING if _print_problems(problems) else 0


def _print_problems(problems: Sequence[str]) -> bool:
    print("".join(f"gpu_check: {line}\n" for line in problems), end="", file=sys.stderr)
    return bool(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument(
        "--dry-run", action="store_true", help="print commands and plans; run nothing"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of this call")
    parser.add_argument(
        "--ram", type=float, metavar="GIB", help="RAM of a machine that adds it with use"
    )
    parser.add_argument("--only", metavar="NAMES", help="run only these checks, and rates")
    parser.add_argument("--fetch", action="store_true", help="download wheels into .whl/")
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="combine results.json of several runs"
    )
    options = parser.parse_args(arguments)
    if options.table:
        return show_table(options.table)
    if options.fetch:
        return carried.fetch()
    stages = options.stages or ["smoke", "tests"]
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(STAGES)}")
    out = Path(os.environ.get("OUT") or REPOSITORY / "build" / "gpu_check").resolve()
    site = (
        BUILT / f"{carried.fingerprint(carried.WHEELS)}-{sys.version_info[0]}{sys.version_info[1]}"
    )
    no_gpu = why_no_gpu()
    if no_gpu is not None:
        print(f"gpu_check: {no_gpu}", file=sys.stderr)
    gib = gpu_gib() if no_gpu is None else WHOLE_GIB
    with tempfile.TemporaryDirectory() as work:
        ram = ram_gib(options.ram) if no_gpu is None else WHOLE_RAM_GIB
        if options.ram is not None:
            os.environ["INFINITY_HOST_RAM"] = f"{options.ram}GiB"
        checks = checks_of(stages, out, Path(work), gib, ram)
        if options.only is not None:
            wanted = {"rates", *options.only.split(",")}
            if unknown := sorted(wanted - {check.name for check in checks}):
                parser.error(f"{unknown[0]!r} is not a check of these stages")
            checks = [check for check in checks if check.name in wanted]
        if options.dry_run or no_gpu is not None:
            code = dry_run(checks, stages, site, out)
            if options.dry_run or code:
                return code
            print("gpu_check: nothing was built, run or reported", file=sys.stderr)
            return NO_GPU
        until = BEGAN + options.limit
        return check_all(checks, stages, site, out, Path(work), gib, until)


def check_all(
    checks: Sequence[Check],
    stages: Sequence[str],
    site: Path,
    out: Path,
    work: Path,
    device_gib: float,
    until: float,
) -> int:
    """Install, build, run and report until time `until`; return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    available = memory_gib()[1]
    paths = [str(site), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Programs of the machine take precedence over carried ones.
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(site / "bin")]))
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ["INFINITY_KERNEL_CACHE"] = str(BUILT / "kernels")  # tests set XDG_CACHE_HOME
    results = run_all([check for check in checks if check.plain], out, work, until)
    done = site / "done"
    if not done.exists():
        shutil.rmtree(BUILT, ignore_errors=True)
        results += run_all(wheels(site), out, work, until)
    sys.path.insert(0, str(site))
    if lacking := carried.missing():
        lacking = [f"missing: {line}" for line in lacking]
        lacking.append("run tools/gpu_check.sh --fetch on a machine with a network")
        print("\n".join(f"gpu_check: {line}" for line in lacking), file=sys.stderr)
        write_report(results, "\n".join(["unknown machine", *lacking]), stages, out, {})
        return MISSING
    if not done.exists():
        results += built(site, out, work, until)
        if results[-1].code == 0:
            site.mkdir(parents=True, exist_ok=True)
            done.touch()
    facts = ""
    if done.exists():
        facts_check = Check("facts", FACTS_S, [sys.executable, "-P", "-c", FACTS])
        facts_result = run(facts_check, FACTS_S, out, work)
        if facts_result.code and carried.has_cuda_core() and (cuda_wheels := carried.of_cuda()):
            # The CUDA packages of the machine fail: install the carried ones.
            results += run_all([Check("cuda", 15, install(site, *cuda_wheels))], out, work, until)
            facts_result = run(facts_check, FACTS_S, out, work)
        facts = facts_result.output
        results.append(facts_result)
        for check in checks:
            if check.plain:
                continue
            wait_for_ram(available - AWAY_GIB)
            results += run_all([check], out, work, until, device_gib)
            # Written after every check, in case the machine is lost.
            write_report(results, facts, stages, out, keep_results(work, checks, out))
    reports = keep_results(work, checks, out)
    keep_traces(work, out)
    report = write_report(results, facts, stages, out, reports)
    print("\n".join(table(reports, found_only=True)))
    print(f"report: {report}")
    failed = [r for r in results if r.code != 0 and r.check.device_gib <= device_gib]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
