"""Tests of the command line: help, completion, exit codes, errors and stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import infinity
from infinity.cli import main, terminal
from infinity.cli.main import app
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def run_process(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, **options
    )


COMMANDS = [
    "doctor", "plan", "init", "train", "run", "generate", "report", "trace", "bench", "checkpoint",
]  # fmt: skip


def test_version_and_help() -> None:
    assert run("--version") == (0, f"infinity {infinity.__version__}\n", "")
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert re.findall(r"\n  ([a-z]+) {2,}", out) == COMMANDS
    assert "tools/bench_swap.py" in run("bench", "--help")[1]


def test_cli_runs_as_a_process() -> None:
    found = run_process("-m", "infinity.cli", "--help", cwd="/")
    assert found.returncode == 0, found.stderr
    assert "Usage: infinity" in found.stdout


def test_console_script_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.scripts]\ninfinity = "infinity.cli.main:main"\n' in text


def test_import_of_cli_does_not_import_torch() -> None:
    """The package is replaced by an empty one, so that only imports of the CLI count."""
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
    ("words", "found"),
    [
        (["tr"], ["train", "trace"]),
        (["checkpoint", "import"], ["import-deepspeed"]),
        (["report", "--ou"], ["--out"]),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_of_verbs_and_options(
    shell: str, words: list[str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called as scripts of `--install-completion` do; only the verbs typed are imported."""
    loaded: list[str] = []
    load = main.load
    monkeypatch.setattr(main, "load", lambda verb: loaded.append(verb) or load(verb))
    typed = " ".join(["infinity", *words])
    environment = {"_INFINITY_COMPLETE": f"complete_{shell}", "COMP_CWORD": str(len(words))}
    environment |= {"COMP_WORDS": typed, "_TYPER_COMPLETE_ARGS": typed}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    out = CliRunner().invoke(app, [], env=environment).stdout
    for word in [*main.VERBS, "import-deepspeed", "verify", "--out"]:
        assert (re.search(rf"(?m)(^|\"){word}(\t|\"|$)", out) is not None) == (word in found)
    assert loaded == words[:-1]


def test_errors_and_warnings_are_colored_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stderr_of(**environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with suppress(typer.Exit), terminal.command():
            warnings.warn("a [b]: c")
            raise ConfigError("d")
        return capsys.readouterr().err

    plain = "warning: a [b]: c\nerror: d\n"
    assert stderr_of() == plain
    with_color = {"FORCE_COLOR": "1", "TERM": "xterm"}
    colored = "\x1b[33mwarning: \x1b[0ma [b]: c\n\x1b[31merror: \x1b[0md\n"
    assert stderr_of(**with_color) == colored
    assert stderr_of(**with_color, NO_COLOR="1") == plain


def test_hub_retries_are_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The client tries six times to reach a closed port."""
    library = pytest.importorskip("huggingface_hub.utils")
    with pytest.raises(Exception, match="refused"), terminal.command():
        library.http_backoff("HEAD", "http://127.0.0.1:9/", base_wait_time=0)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "Hub does not answer" in line] == lines[:1] == lines


BARS = """
import sys, transformers
from tqdm import tqdm
list(tqdm(range(3)))
print(transformers.utils.logging.is_progress_bar_enabled())
"""


def test_progress_bars_of_libraries_are_off_in_logs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BARS)
    unset = {k: v for k, v in os.environ.items() if k not in terminal.BARS}
    for environment, bars in (({}, False), (dict.fromkeys(terminal.BARS, ""), True)):
        done = run_process("-m", "infinity.cli", "run", str(script), env=unset | environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{bars}\n"
        assert ("3/3" in done.stderr) == bars


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["bench", "--path", "{absent}"], 4, "mkdir -p {absent}"),
        (["bench", "--path", "{file}"], 4, "is not a directory"),
        (["bench", "{absent}"], 4, "mkdir -p {absent}"),
        (["bench", "{dir}", "--path", "{dir}"], 2, "twice"),
        (["bench", "{dir}", "--gib", "0.001"], 2, "--gib 0.03125 or more"),
        (["bench", "{dir}", "--gib", "1e9"], 3, "are missing"),
        (["bench", "{dir}", "--rounds", "0"], 2, "--rounds"),
        (["doctor", "--speed"], 2, "--speed"),
        (["plna", "8b"], 2, "No such command 'plna'; did you mean 'plan'?"),
        (["xyzzy"], 2, "there are doctor, plan, init, train"),
    ],
)
def test_invalid_arguments_are_explained(
    tmp_path: Path, arguments: list[str], code: int, part: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir").mkdir()
    paths = {name: str(tmp_path / name) for name in ("file", "dir", "absent")}
    found, out, error = run(*(argument.format(**paths) for argument in arguments))
    assert found == code
    assert out == ""
    assert part.format(**paths) in " ".join(error.split())
    assert "Traceback" not in error
    assert list((tmp_path / "dir").iterdir()) == []


ODD = ("x" * 4096, "a\0b.yaml", "\udcff.yaml", "~no-such-user/a.json", "/dev/full", "file/below")
VERBS = (
    ["run", "ODD"],
    ["train", "ODD"],
    ["train", "run.json", "--resume", "ODD"],
    ["plan", "ODD"],
    ["plan", "run.json", "--model", "ODD"],
    ["plan", "1.3b", "--machine", "ODD"],
    ["init", "--out", "ODD"],
    ["doctor", "--path", "ODD"],
    ["bench", "--path", "ODD"],
    ["checkpoint", "inspect", "ODD"],
    ["checkpoint", "verify", "ODD", "--all"],
    ["checkpoint", "export", "ODD", "out"],
    ["checkpoint", "prune", "ODD", "--keep", "1"],
    ["checkpoint", "import-deepspeed", "ODD", "out"],
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: "-".join(verb))
def test_odd_file_names_never_give_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    given = {"model": {"config": {}}, "run_dir": "run", "data": {"train": "file"}}
    (tmp_path / "run.json").write_text(json.dumps(given))
    before = set(os.listdir())
    for odd in ODD:
        result = CliRunner().invoke(
            app, [odd if argument == "ODD" else argument for argument in verb]
        )
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
def test_system_errors_are_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("infinity.cli.doctor.describe", fail)
    found, out, stderr = run("bench")
    assert (found, out) == (code, "")
    assert stderr.startswith("error: ")
    assert text in stderr


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("infinity.cli.doctor.describe", fail)
    result = CliRunner().invoke(app, ["bench"])
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize(
    ("error", "code"),
    [(InfinityError, 1), (ConfigError, 2), (DoesNotFitError, 3), (MachineError, 4)],
)
def test_exit_code_is_that_of_the_error(
    error: type[InfinityError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise error("what", because="why", remedy="this")

    monkeypatch.setattr("infinity.cli.doctor.describe", fail)
    assert run("bench") == (
        code,
        "",
        "error: what\n  because: why\n  try: this\n",
    )


def test_library_output_on_stdout_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with terminal.library_stdout_to_stderr():
        os.write(1, b"noise of a library\n")
        subprocess.run(["echo", "noise of its compiler"], check=True)
    os.write(1, b"after\n")
    out, error = capfd.readouterr()
    assert out == "before\nafter\n"
    assert "noise of a library" in error
    assert "compiler" in error


def test_stdout_is_restored_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), terminal.library_stdout_to_stderr():
        raise KeyError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
