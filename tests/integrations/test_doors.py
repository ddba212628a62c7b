"""Tests of unmodified DeepSpeed scripts: they run, with equal bits for any placement.

Each script in `doors/` has `main(config, folder)`, which returns its results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forked import Program

import infinity
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.door import set_single_process_environment

ROOT = Path(__file__).parents[2]
DOORS = ROOT / "tests" / "integrations" / "doors"
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
CONFIGS = {
    "hello": {"train_batch_size": 4, **ADAM},
    "cifar": {"train_batch_size": 16, **ADAM},
    "with_accelerate": {"train_batch_size": 4, **ADAM},
    "hf_trainer": {**AUTO, "gradient_clipping": "auto"},
    "hf_trainer_again": {**AUTO, "gradient_clipping": "auto"},
    "bert": ADAM,
    "ranks": {**AUTO, "gradient_clipping": "auto"},
    "with_trl": {**AUTO, "gradient_clipping": "auto"},
    "with_lightning": {},
}
OPTIONAL_PACKAGES = {"with_trl": "trl", "with_lightning": "lightning"}  # `make test-doors`
# The line that a user adds to a script; then each script in turn, as `python script.py` runs it.
RUN_SCRIPTS = """
import infinity; infinity.as_deepspeed()
import json, runpy, sys
from pathlib import Path
told = {}
for script, config, folder in json.loads(sys.argv[1]):
    Path(folder).mkdir()
    sys.path.insert(0, str(Path(script).parent))
    told[folder] = runpy.run_path(script)["main"](config, Path(folder))
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
print("TOLD" + json.dumps(told))
"""


def config_of(name: str, folder: Path, *, on_disk: bool) -> Path:
    """Write a configuration of the script: all on disk at stage 3, or all in RAM at stage 2.

    With both, accelerate replaces torch's Adam by infinity's, which rounds differently.
    """
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    if on_disk:
        (folder / "nvme").mkdir(exist_ok=True)
        nvme = {"device": "nvme", "nvme_path": str(folder / "nvme")}
        zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    path = folder / f"{name}_{'disk' if on_disk else 'ram'}.json"
    path.write_text(json.dumps({**CONFIGS[name], "zero_optimization": zero}))
    return path


def run(folder: Path, *command: str) -> str:
    """Run a Python command and return its stdout; fail unless it exits with 0."""
    root = str(Path(infinity.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def script_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the runs and the results of the scripts by name."""
    pytest.importorskip("transformers")
    return run_all(tmp_path_factory.mktemp("doors"), *(CONFIGS.keys() - OPTIONAL_PACKAGES.keys()))


def run_all(folder: Path, *names: str) -> tuple[Path, dict[str, Any]]:
    """Run scripts on disk and in RAM in one process; return the folder and results by name."""
    scripts = [
        (str(DOORS / f"{name}.py"), str(config_of(name, folder, on_disk=on_disk)),
         str(folder / f"{name}-{on_disk}"))
        for name in sorted(names)
        for on_disk in (False, True)
    ]  # fmt: skip
    found = json.loads(run(folder, "-c", RUN_SCRIPTS, json.dumps(scripts)).rpartition("TOLD")[2])
    for name in names:
        assert found[str(folder / f"{name}-True")] == found[str(folder / f"{name}-False")]
    assert list((folder / "nvme").iterdir()) == []
    return folder, {name: found[str(folder / f"{name}-False")] for name in names}


def test_unmodified_scripts_equal_on_disk_and_in_ram(
    script_results: tuple[Path, dict[str, Any]],
) -> None:
    assert len(script_results[1]["hello"]["losses"]) == 6


@pytest.mark.parametrize(("name", "package"), OPTIONAL_PACKAGES.items())
def test_stock_trainers_of_optional_packages(tmp_path: Path, name: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make test-doors")
    _, found = run_all(tmp_path, name)
    if name == "with_trl":
        plain = run(tmp_path, str(DOORS / f"{name}.py"), "--folder", str(tmp_path / "plain"))
        for kind, steps in json.loads(plain.rpartition("TOLD")[2]).items():
            for found_step, plain_step in zip(found[name][kind], steps, strict=True):
                assert found_step == pytest.approx(plain_step, rel=1e-5, abs=2e-6), kind


@pytest.mark.big  # `tests/ranks/test_deepspeed.py` covers the calls, a test below two processes
def test_two_ranks_equal_one_rank_with_twice_the_micro_batches(
    script_results: tuple[Path, dict[str, Any]],
) -> None:
    """Weights are equal; means over ranks and over micro-batches round differently."""
    (folder, found), out = script_results, script_results[0] / "two"
    one_rank = found["ranks"]
    out.mkdir()
    given = ("--deepspeed", str(folder / "ranks_disk.json"), "--folder", str(out))
    start = ("-m", "infinity.cli", "run", "--gpus", "2", "--local-rank")
    run(folder, *start, str(DOORS / "ranks.py"), *given)
    two = json.loads((out / "told.json").read_text())
    assert two["accelerate"] == one_rank["accelerate"]
    assert two["Trainer"]["weights"] == one_rank["Trainer"]["weights"]
    for found_row, other in zip(
        two["Trainer"]["numbers"], one_rank["Trainer"]["numbers"], strict=True
    ):
        assert found_row == pytest.approx(other, rel=1e-6)


# The code blocks of the page, then the example without and with infinity, in one process.
RUN_PAGE = """
import infinity; infinity.as_deepspeed()
import io, json, runpy, sys
from contextlib import redirect_stdout
from pathlib import Path
page, example, *arguments = sys.argv[1:]
sys.path.insert(0, str(Path(example).parent))
told = []
for block in json.loads(page):
    exec(block, {})
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
for more in ([], arguments):
    sys.argv = [example, "--max_steps", "4", "--logging_steps", "2", *more]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(example, run_name="__main__")
    told.append([float(line.split()[-1]) for line in out.getvalue().splitlines()[-3:]])
    sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
print("TOLD" + json.dumps(told))
"""


def test_documentation_blocks_and_stock_trainer_example_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    infinity_config = str(ROOT / "examples" / "configs" / "ds_infinity.json")
    arguments = (str(ROOT / "examples" / "stock_trainer.py"), "--deepspeed", infinity_config)
    output = run(tmp_path, "-c", RUN_PAGE, json.dumps(blocks), *arguments).rpartition("TOLD")[2]
    plain, offloaded = json.loads(output)
    assert plain == pytest.approx(offloaded, abs=2e-3)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "last"
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def test_stock_trainer_example_on_two_ranks_divides_batches(tmp_path: Path) -> None:
    """With default arguments, without `use_cpu`; evaluation also gathers from both ranks."""
    pytest.importorskip("transformers")
    script = (str(ROOT / "examples" / "stock_trainer.py"), "--max_steps", "2")
    config = ("--deepspeed", str(ROOT / "examples" / "configs" / "ds_infinity.json"))
    output = run(tmp_path, "-m", "infinity.cli", "run", "--gpus", "2", *script, *config)
    first, second = re.findall(r"held-out loss (\d+\.\d+)", output)
    assert first == second
    # Two steps of two ranks with 4 of 200 samples each; rank 0 alone logs.
    assert re.findall(r"'train_loss'.*'epoch': '?([\d.]+)", output) == ["0.08"]


def test_infinity_run_starts_one_and_two_processes(tmp_path: Path) -> None:
    script = str(DOORS / "hello.py")
    config = str(config_of("hello", tmp_path, on_disk=True))
    options = ("--deepspeed", "--deepspeed_config", config, "--folder")
    start = ("-m", "infinity.cli", "run")
    one = json.loads(run(tmp_path, *start, script, *options, str(tmp_path / "one")))
    assert len(one["losses"]) == 6
    given = json.loads(Path(config).read_text()) | {"train_batch_size": 8}
    Path(config).write_text(json.dumps(given))
    two = run(tmp_path, *start, "--gpus", "2", script, *options, str(tmp_path / "two"))
    # Both write to the same pipe: a newline may follow the other process's line.
    first, second = map(json.loads, two.replace("}{", "}\n{").split("\n", 1))
    assert first == second
    assert len(first["losses"]) == 6


def test_announce_alone_picks_free_port() -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    set_single_process_environment(first)
    with socket.create_server((first["MASTER_ADDR"], int(first["MASTER_PORT"]))):
        set_single_process_environment(second)
        socket.create_server((second["MASTER_ADDR"], int(second["MASTER_PORT"]))).close()
    given = {"MASTER_PORT": "7"}
    set_single_process_environment(given)
    assert given["MASTER_PORT"] == "7"


def test_worker_processes_end_with_killed_launcher(tmp_path: Path) -> None:
    """After SIGKILL of the launcher, the shared stdout reaches EOF only when both workers exit."""
    script = tmp_path / "waits.py"
    # One write per line: output of two processes interleaves between writes.
    script.write_text("import os, time\nos.write(1, b'waits\\n')\ntime.sleep(600)\n")
    start = [sys.executable, "-m", "infinity.cli", "run", "--gpus", "2", str(script)]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(2)]
        launcher.kill()
        assert launcher.communicate(timeout=600) == ("", None)
    assert lines == ["waits\n"] * 2


@pytest.mark.big  # covers only another launcher
def test_accelerate_launch_under_infinity_run(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    if shutil.which("accelerate", path=Path(sys.executable).parent) is None:
        pytest.skip("the command accelerate is not installed beside this Python")
    options = "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --num_processes 1"
    script = [str(DOORS / "with_accelerate.py"), "--folder", str(tmp_path)]
    command = ["-m", "infinity.cli", "run", "accelerate", "launch", *options.split(), *script]
    assert len(json.loads(run(tmp_path, *command))["losses"]) == 24


def test_as_deepspeed_after_import_raises(tmp_path: Path) -> None:
    lines = [
        "import sys, types, infinity",
        "sys.modules['deepspeed'] = types.ModuleType('deepspeed')",
        "try: infinity.as_deepspeed()",
        "except infinity.InfinityError as error: print(error)",
        "del sys.modules['deepspeed']",
        "infinity.as_deepspeed()",
        "import deepspeed, importlib.metadata as m",
        "from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as theirs",
        "from deepspeed import zero, comm, dist",
        "assert deepspeed is infinity.deepspeed and dist is comm",
        "assert 'deepspeed' in m.packages_distributions() and m.version('deepspeed') >= '0.19'",
        "import deepspeed.inference.v2.engine_factory, infinity.deepspeed.engine",
        "try: deepspeed.inference.v2.engine_factory.build_engine()",
        "except infinity.ConfigError as error: print(error)",
        "from importlib.util import find_spec",
        "assert find_spec('deepspeed.comm.comm') and find_spec('deepspeed')",
        "assert not isinstance(3, theirs) and not hasattr(deepspeed, '_nothing')",
        "from deepspeed import engine",
        "assert engine is infinity.deepspeed.engine",
    ]
    (script := tmp_path / "script.py").write_text("\n".join(lines))
    with Program(script) as program:
        code, output, error = program.end()
    assert code == 0, error
    assert "deepspeed is imported already" in output
    assert "deepspeed.inference.v2.engine_factory.build_engine is not supported" in output
    assert "engine for inference" in output


def test_run_missing_script_raises() -> None:
    from infinity.cli.run import _python_arguments

    assert _python_arguments("x.train", module=True) == ["-m", "x.train"]
    for name, message in (
        ("nowhere.py", "no file nowhere.py"),
        ("no-such-command", "neither a file nor a command"),
    ):
        with pytest.raises(ConfigError, match=message):
            _python_arguments(name, module=False)
