"""What `gpu_check.sh` carries to a machine without a network: wheels, proven to be enough.

The machine brings Python 3.12, torch for CUDA, and what that brings itself (`THERE`). Everything
else that is asked for, and what that asks for, lies in `.whl/`: `uncovered` reads it from the
wheels' metadata. `.whl/native/` holds this repository built for any Python from 3.12 on, by an
interpreter of here that is as new: compiling it there takes a minute, and a compiler.

cuda-core goes with few versions of cuda-bindings, and torch with many: so these packages are taken
together, the machine's where they do, else those that are carried.
"""

from __future__ import annotations

import email
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
WHEELS = REPOSITORY / ".whl"
LIMIT_BYTES = 64 << 20  # of all that travels: the tree, and `.whl/`
THERE = frozenset({"torch", "numpy", "pip"})
OF_CUDA = ("cuda-core", "cuda-bindings", "cuda-pathfinder")
BINDINGS = "cuda-bindings==13.5.0"  # with the cuda-core of constraints.txt our kernels compile
# What building and testing need beside what pyproject.toml says.
TOOLS = (
    "packaging", "pip", "cmake", "ninja", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis",
    "cuda-bindings",
)  # fmt: skip
PROGRAMS = ("cmake", "ninja")  # the machine's own: half of all bytes, if they were carried
CARRIED = (
    # to run
    *OF_CUDA, "aiofiles", "annotated-doc", "annotated-types", "markdown-it-py", "mdurl", "psutil",
    "pydantic", "pydantic-core", "pygments", "pyyaml", "rich", "shellingham", "typer",
    "typing-extensions", "typing-inspection",
    *(BUILDERS := ("nanobind", "packaging", "pathspec", "scikit-build-core")),
    # to test
    "execnet", "hypothesis", "iniconfig", "pluggy", "pytest", "pytest-timeout", "pytest-xdist",
    "sortedcontainers",
)  # fmt: skip
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
              "manylinux_2_24_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64")  # fmt: skip
# Of the machine, for markers.
_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{_PYTHON}.3",
    "python_version": _PYTHON,
    "sys_platform": "linux",
}
# What the package is made of.
SOURCES = ("infinity", "csrc", "CMakeLists.txt", "pyproject.toml")
# The machine's libstdc++ may be older than ours.
_STATIC = "cmake.define.CMAKE_MODULE_LINKER_FLAGS=-static-libstdc++ -static-libgcc"


class Package(NamedTuple):
    """A version, and the requirements of its metadata."""

    version: str
    requires: tuple[str, ...]


def canonical(name: str) -> str:
    """A name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(pyproject: Path = REPOSITORY / "pyproject.toml") -> list[str]:
    """What is asked for to build, to import, to compute on CUDA and to test."""
    with pyproject.open("rb") as file:
        told = tomllib.load(file)
    project = told["project"]
    found = [*told["build-system"]["requires"], *project["dependencies"]]
    return [*found, *project["optional-dependencies"]["cuda"], *TOOLS]


def name_of(wheel: Path) -> str:
    """Of the distribution."""
    return canonical(wheel.name.partition("-")[0])


def has_cuda_core() -> bool:
    """Whether cuda-core is here, and new enough; `packaging` may not be."""
    try:
        return int(importlib.metadata.version("cuda-core").partition(".")[0]) >= 1
    except importlib.metadata.PackageNotFoundError:
        return False


def of_cuda() -> list[str]:
    """CUDA's packages that are carried."""
    return sorted(str(path) for path in WHEELS.glob("*.whl") if name_of(path) in OF_CUDA)


def missing(pyproject: Path = REPOSITORY / "pyproject.toml") -> list[str]:
    """Requirements that are not met in this process."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, wanted(pyproject)):
        if requirement.name in PROGRAMS and shutil.which(requirement.name):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement}: not there")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement}: {version} is there")
    return found


def uncovered(asked: Iterable[str], carried: Mapping[str, Package]) -> list[str]:
    """What neither the machine nor a carried wheel has, of what is asked for, and of what that asks
    for: each with who asks.
    """
    from packaging.requirements import Requirement

    problems, seen = [], set[str]()
    queue = [(r, "us") for r in map(Requirement, asked) if _applies(r, ())]
    while queue:
        requirement, asker = queue.pop(0)
        name = canonical(requirement.name)
        if name in THERE or name in PROGRAMS:
            continue
        package = carried.get(name)
        if package is None:
            problems.append(f"{requirement}, for {asker}: not carried")
            continue
        if not requirement.specifier.contains(package.version, prereleases=True):
            problems.append(f"{requirement}, for {asker}: {package.version} is carried")
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key not in seen:
            seen.add(key)
            needs = map(Requirement, package.requires)
            queue += [(need, name) for need in needs if _applies(need, requirement.extras)]
    return problems


def _applies(requirement: Any, extras: Collection[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate(_ENVIRONMENT | {"extra": extra}) for extra in ("", *extras)
    )


def wheels() -> dict[str, Package]:
    """What is carried, by name."""
    found = {}
    for path in sorted(WHEELS.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            told = email.message_from_bytes(archive.read(name))
        requires = tuple(str(line) for line in told.get_all("Requires-Dist", []))
        found[canonical(str(told["Name"]))] = Package(str(told["Version"]), requires)
    return found


def fingerprint(*more: Path) -> str:
    """Changes with whatever the package is built from, and with what lies in `more`."""
    found = hashlib.sha256()
    for top in (*(REPOSITORY / name for name in SOURCES), *more):
        files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for path in files:
            if "__pycache__" not in path.parts and path.suffix != ".so":
                found.update(str(path.relative_to(top.parent)).encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def prebuilt() -> Path | None:
    """The carried wheel of this repository, if it is of the sources as they are now."""
    return next((WHEELS / "native" / fingerprint()).glob("*.whl"), None)


def travelling_bytes() -> int:
    """Bytes of the tree, as git knows it, and of what is carried beside it."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=REPOSITORY, text=True
    )
    paths = [REPOSITORY / name for name in listed.split("\0") if name]
    paths += [path for path in WHEELS.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def state() -> tuple[list[str], list[str]]:
    """What there is to say of what lies in `.whl/`, and what is wrong with it."""
    there = wheels()
    nbytes = travelling_bytes()
    said = [f"{len(there)} wheels are carried, {nbytes / 2**20:.0f} MiB with the tree"]
    wrong = uncovered(wanted(), there)
    if nbytes > LIMIT_BYTES:
        wrong.append(f"{nbytes / 2**20:.0f} MiB would travel, {LIMIT_BYTES >> 20} at most may")
    if not wrong:
        said.append(f"they are all that is asked for, but {', '.join(sorted(THERE))}")
    found = prebuilt()
    if found is not None:
        said.append(f"without a compiler there: {found.name}, built from these sources")
    else:
        said.append("no wheel of these sources was built here: a compiler must be there")
    return said, wrong


def fetch() -> int:
    """Bring wheels from the index, and build one of ours; the exit code."""
    WHEELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELS) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", folder]
        command += ["-c", "constraints.txt", "--only-binary=:all:", "--no-deps"]
        command += ["--python-version", _PYTHON, "--implementation", "cp"]
        command += [word for name in _PLATFORMS for word in ("--platform", name)]
        named = [BINDINGS if name == "cuda-bindings" else name for name in CARRIED]
        subprocess.run([*command, *named], cwd=REPOSITORY, check=True)
        for old in WHEELS.glob("*.whl"):  # two versions of one package stop an installation
            old.unlink()
        for new in Path(folder).glob("*.whl"):
            new.rename(WHEELS / new.name)
    if prebuilt() is None:
        _build_ours()
    said, wrong = state()
    print("\n".join([*said, *(f"wrong: {line}" for line in wrong)]))
    return 1 if wrong else 0


def _build_ours() -> None:
    """As the machine will, by an interpreter that is as new as its own.

    Without one, or where it fails, nothing is carried: the machine has a compiler, or it has not.
    """
    python = _as_new()
    shutil.rmtree(WHEELS / "native", ignore_errors=True)
    if python is None:
        print(f"no Python {_PYTHON} or newer is here to build a wheel of ours with")
        return
    pip = [python, "-m", "pip"]
    target = WHEELS / "native" / fingerprint()
    with tempfile.TemporaryDirectory() as site:
        found = [str(path) for path in WHEELS.glob("*.whl") if name_of(path) in BUILDERS]
        install = ["install", "-q", "--no-index", "--no-deps", "--target", site, *found]
        build = ["wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-C", _STATIC]
        environment = os.environ | {"PYTHONPATH": site}
        try:
            subprocess.run([*pip, *install], cwd=REPOSITORY, check=True)
            programs = ["install", "-q", "--no-deps", "--target", site, *PROGRAMS]
            subprocess.run([*pip, *programs], cwd=REPOSITORY, check=True)
            command = [*pip, *build, "-w", str(target), "."]
            subprocess.run(command, cwd=REPOSITORY, check=True, env=environment)
        except subprocess.CalledProcessError as error:
            print(f"no wheel of ours was built: {error}")


def _as_new() -> str | None:
    """An interpreter of here whose wheels the machine's can use."""
    names = [sys.executable, *filter(None, map(shutil.which, ("python3.12", "python3.13")))]
    names += map(str, sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")))
    asks = f"import sys, pip; sys.exit(sys.version_info < ({_PYTHON.replace('.', ', ')}))"
    for name in names:
        if subprocess.run([name, "-c", asks], capture_output=True, check=False).returncode == 0:
            return name
    return None
