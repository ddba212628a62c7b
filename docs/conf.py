"""Sphinx configuration: `make docs` builds the pages and the API."""

import re
import sys
from pathlib import Path
from typing import Any

import infinity
from infinity.integrations.deepspeed.key_table import RENAMED_SECTIONS, TABLE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from config_tables import table_row

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
DEEPSPEED_KEYS = Path(__file__).with_name("deepspeed-keys.md")
NOTES = Path(__file__).with_name("notes.md")


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx reads the sources."""
    write_deepspeed_keys()
    write_notes()


def write_deepspeed_keys() -> None:
    """Write a row for each key of DeepSpeed's configuration."""
    text = [
        "# DeepSpeed keys",
        "",
        "Every key of a DeepSpeed configuration. *done*: applied, by our key where one is named.",
        "*accepted*: without effect, whatever the value. *refused*: an error under the condition,",
        "accepted otherwise.",
        "In parentheses: earlier names of a key.",
        "",
        "A flag is true or false; a count is a whole number of 1 or more, signed any, an interval",
        "may be infinite; a share is between 0 and 1; numbers are one, or one for each parameter",
        "group.",
        "",
        *(f"The section `{new}` may be called `{old}`." for old, new in RENAMED_SECTIONS.items()),
        "",
        "| key | kind | DeepSpeed's default | here | note |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in TABLE:
        name = " ".join([f"`{key.name}`", *(f"(`{old}`)" for old in key.old)])
        kind = key.kind if isinstance(key.kind, str) else ", ".join(f"`{w}`" for w in key.kind)
        here = f"{key.verdict} if {key.when}" if key.when else str(key.verdict)
        ours = f"{here}: `{key.native_key}`" if key.native_key else here
        note = f"{key.note}; {key.remedy}" if key.remedy else key.note
        text.append(table_row(name, kind, f"`{key.default}`", ours, note))
    DEEPSPEED_KEYS.write_text("\n".join(text) + "\n", encoding="utf-8")


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
