"""Tests of the language of docstrings, names, help texts, messages and pages.

`MARKERS` are words that are used in place of technical terms. First paragraphs of docstrings, help
texts, the public interface and pages have none.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from infinity import Config
from infinity.cli.checkpoint import checkpoint
from infinity.cli.main import VERBS, app
from infinity.integrations.deepspeed.key_table import TABLE
from infinity.train.settings import RunConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from config_tables import page_with_tables  # noqa: E402
from docstring_coverage import MARKERS, public_callables  # noqa: E402

GENERATED = ("deepspeed-keys", "notes")  # by `make docs`, from the sources
# Parts of names that stand in place of technical terms; exceptions: terms, and a key of plan.json.
NAMES = re.compile(
    r"(^|_)(own|whole|rest|rests|resting|places?|told|tell|telling|alike|words|theirs|beside|wish|"
    r"wishes|brought|bring|rooms?|lent|lend|away|gone|forget|here|there|apart)(_|$)"
)
# `whole` and `room` are keys of plan.json, `check_apart` is a function of the native kernels.
EXCEPTIONS = {"in_place", "modified_in_place", "update_place", "whole",
              "room", "check_apart"}  # fmt: skip


def first_paragraphs(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            found.append(re.split(r"\n\s*\n", text)[0])
    return found


def test_docstrings_have_no_markers() -> None:
    files = sorted((ROOT / "infinity").rglob("*.py"))
    marked = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in files
        for text in first_paragraphs(file.read_text(encoding="utf-8"))
        if MARKERS.search(text)
    ]
    assert not marked, "reword:\n" + "\n".join(marked)


def defined_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_names_have_no_markers() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "infinity").rglob("*.py")
        for name in defined_names(file.read_text(encoding="utf-8"))
        if NAMES.search(name) and name not in EXCEPTIONS
    }
    assert found == set()


def test_help_texts_have_no_markers() -> None:
    names = [command.name for command in checkpoint.registered_commands]
    subcommands = [["checkpoint", name or command.callback.__name__] for name, command in zip(
        names, checkpoint.registered_commands, strict=True
    )]  # fmt: skip
    for arguments in ([], *([verb] for verb in VERBS), *subcommands):
        text = CliRunner().invoke(app, [*arguments, "--help"]).stdout
        assert MARKERS.findall(text) == [], arguments


def prose_of(page: Path) -> str:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|<[^>]*>|`[^`]*`", " ", text)


def test_pages_have_no_markers() -> None:
    tops = (".", "docs", "docs/benchmarks", "docs/decisions", "examples", "tests")
    pages = [page for top in tops for page in (ROOT / top).glob("*.md")]
    pages = [page for page in pages if page.stem not in GENERATED]
    assert len(pages) > 30
    found = {str(page.relative_to(ROOT)): MARKERS.findall(prose_of(page)) for page in pages}
    assert {page: words for page, words in found.items() if words} == {}


def test_generated_pages_have_no_markers() -> None:
    keys = " ".join(f"{key.note} {key.remedy}" for key in TABLE)
    schemas = [json.dumps(kind.model_json_schema()) for kind in (Config, RunConfig)]
    fields = [re.findall(r'"description": "((?:[^"\\]|\\.)*)"', text) for text in schemas]
    assert len(fields[1]) > len(fields[0]) > 40
    assert MARKERS.findall(keys) == []
    assert [text for texts in fields for text in texts if MARKERS.search(text)] == []


def test_string_constants_have_no_markers() -> None:
    """String constants are messages, tables or pages."""
    found = [
        f"{file.relative_to(ROOT)}:{part.lineno}: {part.value}"
        for file in sorted((ROOT / "infinity").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for part in ast.iter_child_nodes(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
        and MARKERS.search(part.value)
    ]  # fmt: skip
    assert found == []


def test_readme_sentences_are_short() -> None:
    prose = prose_of(ROOT / "README.md")
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#"))]
    paragraphs = re.split(r"\n\s*\n|\n- ", "\n".join(lines))
    for sentence in (s for p in paragraphs for s in re.split(r"[.:?!](?:\s|$)", p)):
        assert len(sentence.split()) <= 25, sentence


def test_page_links_resolve_and_reach_every_page() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    linked = {ROOT / "README.md"}
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not target.startswith(("http", "mailto")):
                file = (page.parent / target).resolve()
                assert file.exists(), f"{page.relative_to(ROOT)}: {target}"
                linked.add(file)
    site = {ROOT / "docs" / f"{name}.md" for name in ("index", "api", *GENERATED)}
    unreachable = [page for page in pages if page.resolve() not in linked | site]
    assert [str(page.relative_to(ROOT)) for page in unreachable] == []


def test_public_docstrings_have_sections_and_no_markers() -> None:
    groups = public_callables()
    assert all(groups.values())
    incomplete = [
        function.name
        for function in (function for found in groups.values() for function in found)
        if not function.text or not function.has_args
        or (function.returns and not function.has_returns) or MARKERS.search(function.text)
    ]  # fmt: skip
    assert incomplete == [], "python tools/docstring_coverage.py --missing"


def test_config_page_describes_every_key() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == page_with_tables(page), "python tools/config_tables.py --write docs/config.md"
    described = re.findall(r"^\| `([^`]+)` \|.*\| \S.* \|$", page, re.MULTILINE)
    assert set(Config().resolved()) <= {*described, "scheduler"}
