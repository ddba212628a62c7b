#!/usr/bin/env python3
"""Generate a Markdown table of `infinity plan` for models far larger than the GPU memory.

    python tools/plan_table.py --write docs/what-fits.md

The machine has a GPU of 24 GiB and the rates of a common machine (`infinity.plan.rates.NOMINAL`;
nothing is measured), with RAM by row and drives by column. A cell is the result of

    infinity plan MODEL --device 24GiB --host RAM --disk 4TiB [--drives 4] [--lora 16] [--rest nf4]

without its advice: the fastest schedule that fits. Nothing is allocated. Models are those of
`infinity.model.named_models`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.cli.plan import find_schedule
from infinity.cli.plan_machine import SearchOptions
from infinity.common.sizes import format_count, format_parameters
from infinity.errors import DoesNotFitError
from infinity.integrations.huggingface.meta import published_target
from infinity.model.named_models import PUBLISHED, SIZES
from infinity.model.targets import named_target
from infinity.plan.inputs import price
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.rates import NOMINAL

GIB = 1 << 30
DEVICE, SPACE = 24 * GIB, 4096 * GIB
MODELS = ("8b", "13b", "70b", *PUBLISHED)
RAM, DRIVES, RANK = (64, 128, 256), (1, 4), 16
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "LoRA": {"lora": RANK},
    "QLoRA": {"lora": RANK, "frozen_format": "nf4"},
}
HEAD = ("model", "trained", "RAM", *(f"{n} drive{'s' if n > 1 else ''}" for n in DRIVES))
BEGIN, END = "<!-- made by tools/plan_table.py -->", "<!-- end -->"


def cell(options: SearchOptions) -> tuple[str, str]:
    """Return the text of a cell, and the reason if no schedule fits (else "")."""
    chosen = find_schedule(options).chosen
    if chosen.best is not None:
        speed, binds = chosen.best.tokens_per_s, chosen.best.cost.binds.replace("_", " ")
        return f"predicted {speed:,.0f} ({binds})", ""
    try:
        price(chosen.smallest).require_fit()
    except DoesNotFitError as error:
        return "predicted not to fit", error.what
    raise AssertionError("what fits has a schedule")


def rows(models: list[str], rams: list[int], tokens: int, length: int, card: Path) -> Iterator[str]:
    """Yield the lines of the table, and below it the reasons why models do not fit."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| " + " | ".join("---" for _ in HEAD) + " |"
    reasons: dict[str, str] = {}
    for name in models:
        target = named_target(name) if name in SIZES else published_target(name)
        sizes = [p.numel() for p in target.module.parameters()]
        num_active = sum(size * target.shares.get(i, 1.0) for i, size in enumerate(sizes))
        line = format_parameters(sum(sizes), round(num_active)).replace(" parameters", "")
        for kind, trained in KINDS.items():
            for ram in rams:
                step = {"tokens": tokens, "sequence": length, "host": ram * GIB, **trained}
                predictions = [
                    cell(SearchOptions(name, machine_file=card, drives=n, disk=n * SPACE, **step))
                    for n in DRIVES
                ]
                reasons |= {f"{name}, {kind}": why for _, why in predictions if why}
                cells = (f"{name}: {line}", kind, f"{ram} GiB", *(text for text, _ in predictions))
                yield "| " + " | ".join(cells) + " |"
    if reasons:
        yield ""
        yield "What does not fit, with the least that was tried:"
        yield ""
        yield from (f"- {name}: {why}." for name, why in reasons.items())


def main() -> None:
    """Print the table; with --write also replace the text between the marks of a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="default: all of them")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--ram", type=int, nargs="*", default=list(RAM), help="GiB of each row")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of a page")
    arguments = parser.parse_args()
    length = min(arguments.sequence, arguments.tokens)
    lines = []
    machine = PlanMachine("common", GIB, DEVICE, SPACE, 16, NOMINAL, (*NOMINAL.numbers(),))
    with tempfile.TemporaryDirectory() as folder:
        card = Path(folder) / "card.json"
        card.write_text(machine.as_text(), encoding="utf-8")
        for line in rows(arguments.models, arguments.ram, arguments.tokens, length, card):
            print(line, flush=True)
            lines.append(line)
    if arguments.write is not None:
        text = arguments.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join([BEGIN, "", *lines, "", END])
        arguments.write.write_text(f"{before}{table}{after}", encoding="utf-8")
        print(f"wrote {arguments.write}: {format_count(len(lines))} lines")


if __name__ == "__main__":
    main()
