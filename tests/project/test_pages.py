"""Tests that documentation pages name existing code, and that the overview is complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "checkpoint", "common", "config", "distributed", "model", "offload", "optim", "plan",
    "profiling", "storage", "training",
)  # fmt: skip
METHOD = re.compile(r"\b([A-Z]\w+)\.(_?[a-z]\w*)\b")


def members() -> dict[str, set[str]]:
    """Return the methods, fields and assigned attributes of each class of the package."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in sorted((ROOT / "infinity").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found.setdefault(node.name, set())
            bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.attr)
    for _ in range(4):  # bases of bases
        for name, names in found.items():
            names.update(*(found.get(base, set()) for base in bases[name]))
    return found


def test_architecture_page_names_every_core_module() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    named = {word.rpartition("/")[2] for word in re.findall(r"`([\w/]+)(?:\.py)?`", text)}
    missing = [
        f"{package}/{file.name}"
        for package in CORE
        for file in sorted((ROOT / "infinity" / package).glob("*.py"))
        if file.stem not in named | {"__init__"}
    ]
    assert not missing, "docs/ARCHITECTURE.md, Packages"


def test_methods_named_in_docs_exist() -> None:
    known = members()
    missing = [
        f"{page.name}: {kind}.{name}"
        for page in sorted((ROOT / "docs").glob("*.md"))
        for kind, name in METHOD.findall(page.read_text(encoding="utf-8"))
        if name not in known.get(kind, {name}) and not name.startswith("model_")  # of pydantic
    ]
    assert not missing
