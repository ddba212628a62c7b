"""Sphinx configuration: `make docs` builds the pages, the API and the configuration reference."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import infinity
from infinity.integrations.deepspeed.key_table import OLD_SECTIONS, TABLE
from infinity.train.settings import RunConfig

project = "torch-infinity"
author = "The torch-infinity maintainers"
release = version = infinity.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torch-infinity"
myst_heading_anchors = 3
# Links to files of the repository outside docs; tests/project/test_style.py follows all links.
suppress_warnings = ["myst.xref_missing"]
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Generated, and not in the repository.
REFERENCE = Path(__file__).with_name("config-reference.md")
DEEPSPEED_KEYS = Path(__file__).with_name("deepspeed-keys.md")
NOTES = Path(__file__).with_name("notes.md")


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx reads the sources."""
    write_reference()
    write_deepspeed_keys()
    write_notes()


def write_reference() -> None:
    """Write a row for each key of our configuration."""
    schemas = {
        "Engine": ("What `initialize` takes.", infinity.Config),
        "Runs": ("What `infinity train` takes; `engine` holds the keys above.", RunConfig),
    }
    text = ["# Configuration reference", "", "Every key, from the schema that checks it."]
    for title, (what, kind) in schemas.items():
        schema = kind.model_json_schema()
        text += ["", f"## {title}", "", what, "", "| key | values | default | |"]
        text += ["| --- | --- | --- | --- |"]
        skipped = "engine" if kind is RunConfig else None
        text += list(rows(schema, schema.get("$defs", {}), "", skipped))
    REFERENCE.write_text("\n".join(text) + "\n", encoding="utf-8")


def rows(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, skipped: str | None
) -> Iterator[str]:
    """Yield a row of Markdown for each key of a section, and for those of its sections."""
    for name, facts in schema["properties"].items():
        section = section_of(facts, definitions)
        if name == skipped:
            continue
        if section is not None and "properties" in section:
            yield from rows(section, definitions, f"{prefix}{name}.", skipped)
            continue
        default = "required" if name in schema.get("required", ()) else "derived"
        if "default" in facts:
            default = f"`{json.dumps(facts['default'])}`"
        text = " ".join(facts.get("description", "").split())
        yield table_row(f"`{prefix}{name}`", values_of(facts, definitions), default, text)


def table_row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_deepspeed_keys() -> None:
    """Write a row for each key of DeepSpeed's configuration."""
    text = [
        "# DeepSpeed keys",
        "",
        "Every key of a DeepSpeed configuration. *done*: applied, by our key where one is named.",
        "*accepted*: without effect. *refused*: an error under the condition, accepted otherwise.",
        "In parentheses: earlier names of a key.",
        "",
        "A flag is true or false; a count is a whole number of 1 or more, signed any, an interval",
        "may be infinite; a share is between 0 and 1; numbers are one, or one for each parameter",
        "group.",
        "",
        *(f"The section `{new}` may be called `{old}`." for old, new in OLD_SECTIONS.items()),
        "",
        "| key | kind | DeepSpeed's default | here | note |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in TABLE:
        name = " ".join([f"`{key.name}`", *(f"(`{old}`)" for old in key.old)])
        kind = key.kind if isinstance(key.kind, str) else ", ".join(f"`{w}`" for w in key.kind)
        here = f"{key.verdict} if {key.when}" if key.when else str(key.verdict)
        ours = f"{here}: `{key.ours}`" if key.ours else here
        note = f"{key.note}; {key.remedy}" if key.remedy else key.note
        text.append(table_row(name, kind, f"`{key.default}`", ours, note))
    DEEPSPEED_KEYS.write_text("\n".join(text) + "\n", encoding="utf-8")


def section_of(facts: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return the schema that a key refers to, alone or beside null."""
    for one in (facts, *facts.get("anyOf", ()), *facts.get("allOf", ())):
        if "$ref" in one:
            return definitions[one["$ref"].rpartition("/")[2]]
    return None


def values_of(facts: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the types and words that a key takes."""
    if "anyOf" in facts:
        return " or ".join(dict.fromkeys(values_of(one, definitions) for one in facts["anyOf"]))
    if "$ref" in facts:
        return values_of(section_of(facts, definitions), definitions)
    if "enum" in facts or "const" in facts:
        return ", ".join(f"`{json.dumps(v)}`" for v in facts.get("enum", [facts.get("const")]))
    return str(facts.get("type", "any"))


def write_notes() -> None:
    """Write an index of the Notes in the sources: file and titles."""
    text = [
        "# Design notes",
        "",
        "Invariants are documented once, next to the code, as `[Note: title]`. This is the index.",
        "",
        "| file | notes |",
        "| --- | --- |",
    ]
    root = Path(__file__).resolve().parent.parent
    for file in sorted(path for top in ("infinity", "csrc") for path in (root / top).rglob("*")):
        if file.suffix in (".py", ".h", ".inl", ".cpp"):
            source = file.read_text(encoding="utf-8")
            titles = re.findall(r"^[/# ]*\[Note: ([^\]]+)\](?:$| [A-Z])", source, re.MULTILINE)
            if titles:
                text.append(table_row(f"`{file.relative_to(root)}`", "; ".join(titles)))
    NOTES.write_text("\n".join(text) + "\n", encoding="utf-8")
