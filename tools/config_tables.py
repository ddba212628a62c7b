#!/usr/bin/env python3
"""Generate the tables of docs/config.md from the schema of the configuration.

python tools/config_tables.py --write docs/config.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import infinity
from infinity.train.settings import RunConfig

BEGIN, END = "<!-- made by tools/config_tables.py -->", "<!-- end -->"


def tables() -> str:
    """Return a table of the keys of the engine, and one of the keys of `infinity train`."""
    schemas = {
        "Engine": ("What `initialize` takes.", infinity.Config),
        "Runs": ("What `infinity train` takes; `engine` holds the keys above.", RunConfig),
    }
    text = [BEGIN]
    for title, (intro, schema_class) in schemas.items():
        schema = schema_class.model_json_schema()
        skipped = "engine" if schema_class is RunConfig else None
        text += ["", f"## {title}", "", intro, "", "| key | values | default | |"]
        text += ["| --- | --- | --- | --- |"]
        text += rows(schema, schema.get("$defs", {}), "", skipped)
    return "\n".join([*text, "", END])


def rows(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, skipped: str | None
) -> Iterator[str]:
    """Yield a Markdown row for each key of a section, recursively."""
    for name, facts in schema["properties"].items():
        section = section_of(facts, definitions)
        if name == skipped:
            continue
        if section is not None and "properties" in section:
            yield from rows(section, definitions, f"{prefix}{name}.", skipped)
            continue
        default = "by type" if prefix == "optimizer." else "none"
        if name in schema.get("required", ()):
            default = "required"
        elif "default" in facts:
            default = f"`{json.dumps(facts['default'])}`"
        text = " ".join(facts["description"].split())
        yield table_row(f"`{prefix}{name}`", values_of(facts, definitions), default, text)


def table_row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def section_of(facts: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return the schema that a key refers to, directly or in a union with null."""
    for schema in (facts, *facts.get("anyOf", ()), *facts.get("allOf", ())):
        if "$ref" in schema:
            return definitions[schema["$ref"].rpartition("/")[2]]
    return None


def values_of(facts: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the types and values that a key accepts."""
    if "anyOf" in facts:
        return " or ".join(
            dict.fromkeys(values_of(schema, definitions) for schema in facts["anyOf"])
        )
    if "$ref" in facts:
        return values_of(section_of(facts, definitions), definitions)
    if "enum" in facts or "const" in facts:
        return ", ".join(f"`{json.dumps(v)}`" for v in facts.get("enum", [facts.get("const")]))
    return str(facts.get("type", "any"))


def page_with_tables(text: str) -> str:
    """Return the page with the text between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables of a page")
    page = parser.parse_args().write
    if page is None:
        print(tables())
    else:
        page.write_text(page_with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
