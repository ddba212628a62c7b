"""The command line: help, exit codes, one JSON object, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import wait_until
from typer.testing import CliRunner

import infinity
from infinity.bench.faults import RIGHT_ERRORS
from infinity.cli import bench, ending
from infinity.cli.bench_page import recommended_yaml, show_disk, show_faults
from infinity.cli.main import app
from infinity.config import load_config
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError

ROOT = Path(__file__).resolve().parent.parent
BRIEF = ["--gib", "0.0625", "--rounds", "1", "--sample-s", "0.01", "--chunk", "1MiB"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def run_process(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, **options
    )


COMMANDS = ["doctor", "plan", "init", "train", "trace", "bench", "checkpoint"]


def test_version_and_help() -> None:
    assert run("--version") == (0, f"infinity {infinity.__version__}\n", "")
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert re.findall(r"\n  ([a-z]+) {2,}", out) == COMMANDS
    assert "disk" in run("bench")[1]
    code, out, _ = run("bench", "disk", "--help")
    assert code == 0
    for option in ("--path", "--gib", "--json", "--compare", "--faults", "--rounds"):
        assert option in out


@pytest.mark.parametrize("command", [["-m", "infinity.cli"], [str(ROOT / "tools/bench_swap.py")]])
def test_as_a_process(command: list[str]) -> None:
    found = run_process(*command, "--help", cwd="/")
    assert found.returncode == 0, found.stderr
    assert "Usage: infinity" in found.stdout


def test_the_console_script_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.scripts]\ninfinity = "infinity.cli.main:main"\n' in text


def test_starting_does_not_import_torch() -> None:
    """The package itself is replaced by an empty one: only what the command line does counts."""
    folder = Path(infinity.__file__).parent
    code = f"""
import sys, types
package = types.ModuleType("infinity")
package.__path__ = [{str(folder)!r}]
package.__version__ = "0"
sys.modules["infinity"] = package
import infinity.cli.main
heavy = {{"torch", "numpy", "rich.progress", "pydantic"}} & set(sys.modules)
assert not heavy, heavy
"""
    found = run_process("-c", code)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["bench", "disk"], 2, "--path"),
        (["bench", "disk", "--path", "{absent}"], 4, "mkdir -p {absent}"),
        (["bench", "disk", "--path", "{file}"], 4, "is not a directory"),
        (["bench", "disk", "--path", "{dir}", "--gib", "1e9"], 3, "are missing"),
        (["bench", "disk", "--path", "{dir}", "--gib", "x"], 2, "--gib"),
        (["bench", "disk", "--path", "{dir}", "--compare", "dd"], 2, "does not know dd"),
        (["bench", "disk", "--path", "{dir}", "--chunk", "5 apples"], 2, "apples"),
        (["bench", "disk", "--path", "{dir}", "--gib", "0.001"], 2, "hold no chunk"),
        (["bench", "disk", "--path", "{dir}", "--path", "{dir}"], 2, "twice"),
        (["bench", "disk", "--path", "{absent}", "--faults", "1"], 4, "does not exist"),
        (["bench", "tape"], 2, "tape"),
        (["doctor", "--speed"], 2, "--speed"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, arguments: list[str], code: int, part: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir").mkdir()
    places = {name: str(tmp_path / name) for name in ("file", "dir", "absent")}
    found, out, error = run(*(argument.format(**places) for argument in arguments))
    assert found == code
    assert out == ""
    assert part.format(**places) in " ".join(error.split())
    assert "Traceback" not in error
    assert list((tmp_path / "dir").iterdir()) == []


ODD = ("x" * 4096, "a\0b.yaml", "\udcff.yaml", "~no-such-user/a.json", "/dev/full", "file/below")
VERBS = (
    ["train", "ODD"],
    ["train", "run.json", "--resume", "ODD"],
    ["plan", "ODD"],
    ["plan", "run.json", "--model", "ODD"],
    ["plan", "1.3b", "--machine", "ODD"],
    ["init", "--out", "ODD"],
    ["doctor", "--path", "ODD"],
    ["bench", "disk", "--path", "ODD", "--gib", "0.001"],
    ["checkpoint", "inspect", "ODD"],
    ["checkpoint", "verify", "ODD", "--all"],
    ["checkpoint", "export", "ODD", "out"],
    ["checkpoint", "prune", "ODD", "--keep", "1"],
    ["checkpoint", "import-deepspeed", "ODD", "out"],
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: "-".join(verb))
def test_no_name_of_a_file_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    given = {"model": {"config": {}}, "run_dir": "run", "data": {"train": "file"}}
    (tmp_path / "run.json").write_text(json.dumps(given))
    before = set(os.listdir())
    for odd in ODD:
        result = CliRunner().invoke(app, [odd if part == "ODD" else part for part in verb])
        assert isinstance(result.exception, SystemExit), (odd, result.exception)
        assert result.exit_code in (2, 4, 5) or verb[0] == "doctor", odd
        assert "error: " in result.stderr.lower() or verb[0] == "doctor", odd
        assert "Traceback" not in result.stderr
    assert set(os.listdir()) - before <= {"\udcff.yaml"}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(28, "No space left on device", "/a"), 4, "'/a': No space left on device\n  bec"),
        (MemoryError(), 4, "there is not enough RAM"),
        (RecursionError("deep"), 2, "is nested too deeply"),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "why"), 2, "is not UTF-8"),
    ],
)
def test_errors_of_the_system_are_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("infinity.bench.disk.measure_disk", fail)
    found, out, told = run("bench", "disk", "--path", ".")
    assert (found, out) == (code, "")
    assert told.startswith("error: ")
    assert text in told


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("infinity.bench.disk.measure_disk", fail)
    result = CliRunner().invoke(app, ["bench", "disk", "--path", "."])
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize(
    ("error", "code"),
    [(InfinityError, 1), (ConfigError, 2), (DoesNotFitError, 3), (MachineError, 4)],
)
def test_exit_codes_are_the_errors_own(
    error: type[InfinityError],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise error("what", because="why", remedy="this")

    monkeypatch.setattr("infinity.bench.disk.measure_disk", fail)
    assert run("bench", "disk", "--path", str(tmp_path)) == (
        code,
        "",
        "error: what\n  because: why\n  try: this\n",
    )


def test_libraries_may_talk_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with ending.stdout_is_ours():
        os.write(1, b"noise of a library\n")
        subprocess.run(["echo", "noise of its compiler"], check=True)
    os.write(1, b"after\n")
    out, error = capfd.readouterr()
    assert out == "before\nafter\n"
    assert "noise of a library" in error
    assert "compiler" in error


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), ending.stdout_is_ours():
        raise KeyError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def children_named(name: str, parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if f"({name})" in text and int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        ("writing test files", signal.SIGINT),
        ("trying settings", signal.SIGTERM),
        ("choosing the reference", signal.SIGINT),
        ("measuring", signal.SIGTERM),
    ],
)
def test_a_signal_ends_it_and_leaves_nothing(
    tmp_path: Path, phase: str, signum: signal.Signals
) -> None:
    arguments = ["--path", str(tmp_path), "--gib", "0.0625", "--rounds", "4000"]
    arguments += ["--sample-s", "0.01", "--chunk", "1MiB", "--json"]
    with_fio = shutil.which("fio") is not None and phase == "choosing the reference"
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity.cli", "bench", "disk", *arguments],
        env=os.environ | ({} if with_fio else {"PATH": "/nonexistent"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any(phase in line for line in process.stderr)
        fios: list[int] = []
        if with_fio:
            assert wait_until(lambda: fios.extend(children_named("fio", process.pid)) or fios)
        process.send_signal(signum)
        process.send_signal(signum)  # an impatient one must not leave files behind
        out, error = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signum, error
    assert out == ""
    assert f"stopped by {signum.name}" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    if with_fio:
        assert not any(Path(f"/proc/{pid}").exists() for pid in fios)


def a_report() -> dict[str, Any]:
    """A report as `assemble` makes it, with round numbers."""
    ours = {"median_gib_s": 2.0, "min_gib_s": 1.0, "max_gib_s": 3.0, "cpu_s_per_gib": 0.05}
    other = ours | {"cpu_s_per_gib": None, "is_reference": True}
    modes = ("read", "write", "mixed")
    settings = {"block_size": 2**20, "queue_depth": 16, "num_threads": 4}
    return {
        "best": {"config": settings | {"backend": "io_uring"}},
        "configs": {"threads": settings | {"backend": "threads", "num_threads": 8}},
        "reference": {"names": dict.fromkeys(modes, "plain")},
        "ratio_backend": "io_uring",
        "holds": {"io_uring": {"read": True, "write": True, "mixed": False}},
        "ratio": dict.fromkeys(modes, 0.9),
        "ratio_interval": {mode: [0.8, 1.0] for mode in modes},
        "ratio_coverage": dict.fromkeys(modes, 0.93),
        "target": 0.97,
        "rounds": 11,
        "contenders": {
            "mine": dict.fromkeys(modes, ours | {"is_reference": False}),
            "plain": {"read": other},
        },
        "left_out": {"deepspeed": "deepspeed is not importable"},
        "notes": ["it is slow"],
        "machine": {
            "processor": "cpu",
            "num_cpus": 2,
            "kernel": "6",
            "date": "today",
            "load_average": 1.0,
            "load_average_after": 2.0,
        },
        "drives": [
            {
                "path": "/mnt/a",
                "file_system": "fuse",
                "device": "0:44",
                "model": "",
                "direct": False,
                "direct_reason": "open with O_DIRECT failed",
                "free_bytes": 2**30,
                "backends": {"io_uring": {"ok": False, "reason": "seccomp"}},
            }
        ],
        "training": {
            "sweep_parameters_per_s": 73e6,
            "num_parameters": 7 * 10**9,
            "read_bytes": 98 * 10**9,
            "written_bytes": 84 * 10**9,
            "step_s": 96.0,
            "steps_per_100_tbw": 1190.0,
        },
    }


def test_the_page_says_what_the_report_holds(capsys: pytest.CaptureFixture[str]) -> None:
    show_disk(a_report())
    out = capsys.readouterr().out
    for part in (
        "2.00 (1.00-3.00) *",
        "0.050 / 0.050 / 0.050",
        "BUFFERED: open with O_DIRECT failed",
        "io_uring does not work here: seccomp",
        "left out: deepspeed: deepspeed is not importable",
        "note: it is slow",
        "mixed  io_uring / plain: 0.900, 93% interval 0.800 to 1.000: BELOW (target 0.97)",
        "bf16 AdamW state streams at 0.073 Gparam/s",
        "A 7.0B step",
        "reads 91.27 GiB, writes 78.23 GiB, and takes >= 1 min 36 s",
        "84 GB a step: 100 TB of its rated writes last for 1190 steps",
    ):
        assert part in out, part


def test_the_recommended_block_is_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(recommended_yaml(a_report()))
    config = load_config(path)
    assert [str(place) for place in config.nvme_path] == ["/mnt/a"]
    assert config.io.backend == "auto", "io_uring where it works, threads where it does not"
    assert (config.io.block_size, config.io.queue_depth) == (2**20, 16)
    assert config.io.num_threads == 8, "for the fall-back"
    report = a_report()
    report["best"]["config"] |= {"backend": "threads", "block_size": 512 * 2**10}
    report["drives"].append({"path": "/mnt/b c"})
    path.write_text(recommended_yaml(report))
    config = load_config(path)
    assert (config.io.backend, config.io.block_size) == ("threads", 512 * 2**10)
    assert [str(place) for place in config.nvme_path] == ["/mnt/a", "/mnt/b c"]


def test_faults_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.bench.faults.usable_backends", lambda answers: ["threads"])
    monkeypatch.setattr("infinity.bench.faults._STUCK_AFTER_S", 0.1)  # it is waited for
    monkeypatch.setattr("infinity.bench.faults._NUM_CHUNKS", 16)
    code, out, _ = run("bench", "disk", "--path", str(tmp_path), "--faults", "3", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    kinds = {entry["kind"]: entry for entry in report["kinds"]}
    assert set(kinds) == {*RIGHT_ERRORS, "all together"}
    assert kinds["flip"]["caught"] > 0
    assert kinds["eio"]["raised"]["EIO"] > 0
    assert list(tmp_path.iterdir()) == []
    show_faults(report)


def test_silent_wrong_bytes_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.bench.faults.usable_backends", lambda answers: ["threads"])
    monkeypatch.setattr("infinity.bench.faults.RIGHT_ERRORS", {"flip": frozenset()})
    monkeypatch.setattr("infinity.bench.faults._TOGETHER", "flip")
    monkeypatch.setattr("infinity.bench.faults.checksums", lambda memory: b"blind")
    code, out, _ = run("bench", "disk", "--path", str(tmp_path), "--faults", "3")
    assert code == 1
    assert "WRONG" in out
    assert list(tmp_path.iterdir()) == []


def test_all_means_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measure(options: Any, watcher: Any, command: Any) -> Any:
        seen.append(options)
        raise MachineError("enough")

    monkeypatch.setattr("infinity.bench.disk.measure_disk", measure)
    run("bench", "disk", "--path", str(tmp_path), *BRIEF, "--compare", "all")
    run("bench", "disk", "--path", str(tmp_path), *BRIEF, "--compare", "fio, aiofiles,fio")
    assert seen[0].compare == ("fio", "plain", "deepspeed", "buffered", "aiofiles")
    assert seen[1].compare == ("fio", "aiofiles")
    assert (seen[1].file_bytes, seen[1].chunk_bytes) == (2**26, 2**20)
    assert (seen[1].num_rounds, seen[1].sample_s) == (1, 0.01)
    assert bench.bench.info.name == "bench"
