"""Wheels that `gpu_check.sh` carries to a machine without network, and checks of completeness.

The machine has Python 3.12, torch for CUDA and its dependencies (`THERE`). All other requirements
are in `.whl/`, including transitive ones, which `uncovered` reads from the metadata of the wheels.
`.whl/native/` has a wheel of this repository for Python 3.12 and newer (stable ABI), so that the
machine needs no compiler and saves a minute.

cuda-core supports few versions of cuda-bindings, torch many. These packages are therefore used
together: those of the machine if they work, else the carried ones.
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
LIMIT_BYTES = 64 << 20  # limit of the transfer: the tree and `.whl/`
THERE = frozenset({"torch", "numpy", "pip"})
OF_CUDA = ("cuda-core", "cuda-bindings", "cuda-pathfinder")
BINDINGS = "cuda-bindings==13.5.0"  # compiles the kernels with the cuda-core of constraints.txt
# Requirements of build and tests that pyproject.toml does not list.
TOOLS = (
    "packaging", "pip", "cmake", "ninja", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis",
    "cuda-bindings",
)  # fmt: skip
PROGRAMS = ("cmake", "ninja")  # used from the machine: they would be half of all bytes
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
# Environment of the machine for requirement markers.
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
# Sources of the package.
SOURCES = ("infinity", "csrc", "CMakeLists.txt", "pyproject.toml")
# The libstdc++ of the machine may be older than that of the build.
_STATIC = "cmake.define.CMAKE_MODULE_LINKER_FLAGS=-static-libstdc++ -static-libgcc"


class Package(NamedTuple):
    """Version and requirements from the metadata of a wheel."""

    version: str
    requires: tuple[str, ...]


def canonical(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(pyproject: Path = REPOSITORY / "pyproject.toml") -> list[str]:
    """Return the requirements to build, import, compute on CUDA and test."""
    with pyproject.open("rb") as file:
        project_file = tomllib.load(file)
    project = project_file["project"]
    requirements = [*project_file["build-system"]["requires"], *project["dependencies"]]
    return [*requirements, *project["optional-dependencies"]["cuda"], *TOOLS]


def name_of(wheel: Path) -> str:
    """Return the name of the distribution of a wheel."""
    return canonical(wheel.name.partition("-")[0])


def has_cuda_core() -> bool:
    """Return True if cuda-core 1.0 or newer is installed; works without `packaging`."""
    try:
        return int(importlib.metadata.version("cuda-core").partition(".")[0]) >= 1
    except importlib.metadata.PackageNotFoundError:
        return False


def of_cuda() -> list[str]:
    """Return the paths of the carried wheels of CUDA packages."""
    return sorted(str(path) for path in WHEELS.glob("*.whl") if name_of(path) in OF_CUDA)


def missing(pyproject: Path = REPOSITORY / "pyproject.toml") -> list[str]:
    """Return the requirements that this environment does not meet, as messages."""
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, wanted(pyproject)):
        if requirement.name in PROGRAMS and shutil.which(requirement.name):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement}: not there")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement}: {version} is there")
    return problems


def uncovered(requirements: Iterable[str], carried: Mapping[str, Package]) -> list[str]:
    """Return messages for requirements, direct or transitive, that no package fulfills."""
    from packaging.requirements import Requirement

    problems, seen = [], set[str]()
    queue = [(r, "us") for r in map(Requirement, requirements) if _applies(r, ())]
    while queue:
        requirement, dependent = queue.pop(0)
        name = canonical(requirement.name)
        if name in THERE or name in PROGRAMS:
            continue
        package = carried.get(name)
        if package is None:
            problems.append(f"{requirement}, for {dependent}: not carried")
            continue
        if not requirement.specifier.contains(package.version, prereleases=True):
            problems.append(f"{requirement}, for {dependent}: {package.version} is carried")
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key not in seen:
            seen.add(key)
            dependencies = map(Requirement, package.requires)
            queue += [
                (dependency, name)
                for dependency in dependencies
                if _applies(dependency, requirement.extras)
            ]
    return problems


def _applies(requirement: Any, extras: Collection[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate(_ENVIRONMENT | {"extra": extra}) for extra in ("", *extras)
    )


def wheels() -> dict[str, Package]:
    """Return the carried packages by name."""
    packages = {}
    for path in sorted(WHEELS.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
        requires = tuple(str(line) for line in metadata.get_all("Requires-Dist", []))
        packages[canonical(str(metadata["Name"]))] = Package(str(metadata["Version"]), requires)
    return packages


def fingerprint(*more: Path) -> str:
    """Return a hash of the sources of the package and of the files in `more`."""
    digest = hashlib.sha256()
    for top in (*(REPOSITORY / name for name in SOURCES), *more):
        files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for path in files:
            if "__pycache__" not in path.parts and path.suffix != ".so":
                digest.update(str(path.relative_to(top.parent)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def prebuilt() -> Path | None:
    """Return the carried wheel of this repository, or None if it does not match the sources."""
    return next((WHEELS / "native" / fingerprint()).glob("*.whl"), None)


def travelling_bytes() -> int:
    """Return the bytes of the files known to git and of the carried wheels."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=REPOSITORY, text=True
    )
    paths = [REPOSITORY / name for name in listed.split("\0") if name]
    paths += [path for path in WHEELS.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def state() -> tuple[list[str], list[str]]:
    """Return (messages, problems) of the state of `.whl/`."""
    packages = wheels()
    nbytes = travelling_bytes()
    messages = [f"{len(packages)} wheels are carried, {nbytes / 2**20:.0f} MiB with the tree"]
    problems = uncovered(wanted(), packages)
    if nbytes > LIMIT_BYTES:
        problems.append(f"{nbytes / 2**20:.0f} MiB would travel, {LIMIT_BYTES >> 20} at most may")
    if not problems:
        messages.append(f"they are all that is asked for, but {', '.join(sorted(THERE))}")
    native = prebuilt()
    if native is not None:
        messages.append(f"without a compiler there: {native.name}, built from these sources")
    else:
        messages.append("no wheel of these sources was built here: a compiler must be there")
    return messages, problems


def fetch() -> int:
    """Download wheels and build the one of this repository; return the exit code."""
    WHEELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELS) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", folder]
        command += ["-c", "constraints.txt", "--only-binary=:all:", "--no-deps"]
        command += ["--python-version", _PYTHON, "--implementation", "cp"]
        command += [word for name in _PLATFORMS for word in ("--platform", name)]
        requirements = [BINDINGS if name == "cuda-bindings" else name for name in CARRIED]
        subprocess.run([*command, *requirements], cwd=REPOSITORY, check=True)
        for old in WHEELS.glob("*.whl"):  # pip refuses two versions of a package
            old.unlink()
        for new in Path(folder).glob("*.whl"):
            new.rename(WHEELS / new.name)
    if prebuilt() is None:
        _build_wheel()
    messages, problems = state()
    print("\n".join([*messages, *(f"wrong: {line}" for line in problems)]))
    return 1 if problems else 0


def _build_wheel() -> None:
    """Build the wheel of this repository with Python 3.12 or newer.

    Without such an interpreter, or if the build fails, no wheel is carried and the machine needs a
    compiler.
    """
    python = _find_interpreter()
    shutil.rmtree(WHEELS / "native", ignore_errors=True)
    if python is None:
        print(f"there is no Python {_PYTHON} or newer to build the wheel of infinity")
        return
    pip = [python, "-m", "pip"]
    target = WHEELS / "native" / fingerprint()
    with tempfile.TemporaryDirectory() as site:
        builders = [str(path) for path in WHEELS.glob("*.whl") if name_of(path) in BUILDERS]
        install = ["install", "-q", "--no-index", "--no-deps", "--target", site, *builders]
        build = ["wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-C", _STATIC]
        environment = os.environ | {"PYTHONPATH": site}
        try:
            subprocess.run([*pip, *install], cwd=REPOSITORY, check=True)
            programs = ["install", "-q", "--no-deps", "--target", site, *PROGRAMS]
            subprocess.run([*pip, *programs], cwd=REPOSITORY, check=True)
            command = [*pip, *build, "-w", str(target), "."]
            subprocess.run(command, cwd=REPOSITORY, check=True, env=environment)
        except subprocess.CalledProcessError as error:
            print(f"the wheel of infinity was not built: {error}")


def _find_interpreter() -> str | None:
    """Return a local interpreter whose wheels the machine can use, or None."""
    names = [sys.executable, *filter(None, map(shutil.which, ("python3.12", "python3.13")))]
    names += map(str, sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")))
    check = f"import sys, pip; sys.exit(sys.version_info < ({_PYTHON.replace('.', ', ')}))"
    for name in names:
        if subprocess.run([name, "-c", check], capture_output=True, check=False).returncode == 0:
            return name
    return None
