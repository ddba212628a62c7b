#!/usr/bin/env python3
"""What `infinity plan` predicts for models far larger than a card: a table in Markdown.

    python tools/plan_table.py --write docs/what-fits.md

One card of 24 GiB with the rates of a common machine (`infinity.plan.rates.NOMINAL`; nothing is
measured), RAM and drives as rows and columns say. A cell is the answer of

    infinity plan MODEL --device 24GiB --host RAM --disk 4TiB [--drives 4] [--lora 16] [--rest nf4]

without its advice, which takes longer than the answer: the fastest schedule that fits. Nothing is
allocated. Models are those of `infinity.model.named_models`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from infinity.common.sizes import format_count, format_parameters
from infinity.config.schema import load_config
from infinity.errors import DoesNotFitError
from infinity.integrations.huggingface.meta import published_target
from infinity.model.named_models import PUBLISHED, SIZES
from infinity.model.partition import (
    adapter_case,
    case_for,
    groups_of,
    other_ranges,
    partition_model,
)
from infinity.model.shapes import Target, named_target
from infinity.plan.batch_schedule import BatchSchedule, choose_schedule
from infinity.plan.inputs import PlanInput, price
from infinity.plan.machine import PlanMachine
from infinity.plan.rates import NOMINAL

GIB = 1 << 30
DEVICE, DISK, SPACE = 24 * GIB, ("disk_read", "disk_write", "disk_mixed"), 4096 * GIB
MODELS = ("8b", "13b", "70b", *PUBLISHED)
KINDS = {"all": None, "LoRA": "as_is", "QLoRA": "nf4"}
RAM, DRIVES, RANK = (64, 128, 256), (1, 4), 16
HEAD = ("model", "trained", "RAM", *(f"{n} drive{'s' if n > 1 else ''}" for n in DRIVES))
BEGIN, END = "<!-- made by tools/plan_table.py -->", "<!-- end -->"


def case_of(
    target: Target, kind: str, ram: int, drives: int, tokens: int, length: int
) -> tuple[PlanInput, Target]:
    """One model on one machine, all tokens in one micro-batch; with its adapters."""
    config = load_config({"nvme_path": "/nvme"}).with_chunked_logits()
    rates = replace(NOMINAL, **{name: drives * getattr(NOMINAL, name) for name in DISK})
    machine = PlanMachine("table", ram * GIB, DEVICE, drives * SPACE, 16, rates)
    groups = groups_of(target.module, config)
    cut = partition_model(target.module, config, groups, None)
    made = target.made_bytes(quantises=KINDS[kind] == "nf4")
    case = case_for(
        target, cut, groups, config, machine, tokens, recompute=False, made=made, length=length
    )
    rest = KINDS[kind]
    if rest is None:
        return case, target
    return adapter_case(case, target, RANK, rest), target.with_adapters(RANK)


def cell(case: PlanInput, target: Target, samples: int) -> tuple[str, str]:
    """What is predicted, and why nothing is where no schedule fits."""
    chosen = choose_schedule(case, BatchSchedule(), samples, other_ranges(case, target))
    if chosen.best is not None:
        speed, binds = chosen.best.tokens_per_s, chosen.best.cost.binds.replace("_", " ")
        return f"predicted {speed:,.0f} ({binds})", ""
    try:
        price(chosen.smallest).require_room()
    except DoesNotFitError as error:
        return "predicted not to fit", error.what
    raise AssertionError("what fits has a schedule")


def rows(models: list[str], rams: list[int], tokens: int, length: int) -> Iterator[str]:
    """The lines of the table, and below it why models do not fit."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| " + " | ".join("---" for _ in HEAD) + " |"
    reasons: dict[str, str] = {}
    for name in models:
        target = named_target(name) if name in SIZES else published_target(name)
        sizes = [p.numel() for p in target.module.parameters()]
        used = sum(size * target.shares.get(i, 1.0) for i, size in enumerate(sizes))
        line = format_parameters(sum(sizes), round(used)).replace(" parameters", "")
        for kind in KINDS:
            for ram in rams:
                found = [
                    cell(*case_of(target, kind, ram, drives, tokens, length), tokens // length)
                    for drives in DRIVES
                ]
                reasons |= {f"{name}, {kind}": why for _, why in found if why}
                cells = (f"{name}: {line}", kind, f"{ram} GiB", *(text for text, _ in found))
                yield "| " + " | ".join(cells) + " |"
    if reasons:
        yield ""
        yield "What does not fit, with the least that was tried:"
        yield ""
        yield from (f"- {name}: {why}." for name, why in reasons.items())


def main() -> None:
    """Print the table, or write it into a page, between its two marks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="default: all of them")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--ram", type=int, nargs="*", default=list(RAM), help="GiB of each row")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of a page")
    arguments = parser.parse_args()
    length = min(arguments.sequence, arguments.tokens)
    lines = []
    for line in rows(arguments.models, arguments.ram, arguments.tokens, length):
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
