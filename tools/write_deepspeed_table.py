"""Write the key table into docs/migrating-from-deepspeed.md, from infinity/deepspeed/keys.py.

    python tools/write_deepspeed_table.py

tests/test_deepspeed_config.py fails where the page and the code disagree.
"""

from __future__ import annotations

from pathlib import Path

from infinity.deepspeed.keys import as_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrating-from-deepspeed.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def main() -> None:
    """Replace what stands between the two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{as_markdown()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
