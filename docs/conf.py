"""Sphinx configuration: `make docs` builds the pages, the API and the configuration reference."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import infinity
from infinity.runs.settings import RunConfig

project = "torch-infinity"
author = "The torch-infinity maintainers"
release = version = infinity.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torch-infinity"
myst_heading_anchors = 3
# Links to files of the repository outside docs; tests/test_style.py follows all links.
suppress_warnings = ["myst.xref_missing"]
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

REFERENCE = Path(__file__).with_name("config-reference.md")  # made, and not in the repository


def setup(app: Any) -> None:
    """Write the configuration reference before pages are read."""
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
        cells = (f"`{prefix}{name}`", values_of(facts, definitions), default, text)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
