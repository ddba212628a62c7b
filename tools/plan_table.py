#!/usr/bin/env python3
"""What `infinity plan` predicts for models far larger than a card: a table in Markdown.

    python tools/plan_table.py > table.md

One card of 24 GiB with the rates of a common machine (`infinity.plan.cost.NOMINAL`; nothing is
measured), RAM and drives as the rows say. Four drives are as one of four times the rates. Nothing
is allocated, and no model is needed: shapes are those of the configurations below.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from infinity.config.schema import load_config
from infinity.cutting import Cut, case_for, cut_model, groups_of
from infinity.huggingface.meta import find_target
from infinity.model.shapes import NAMED, Target
from infinity.plan.activations import num_blocks
from infinity.plan.batch_schedule import BatchSchedule, choose_schedule
from infinity.plan.case import Case, Priced
from infinity.plan.cost import NOMINAL
from infinity.plan.machine import PlanMachine

GIB = 1 << 30
MODELS = {
    "8B (Llama 3.1)": NAMED["8b"],
    "32B (Qwen 2.5)": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "70B (Llama 2)": NAMED["70b"],
    "123B (Mistral Large)": {
        "model_type": "mistral", "hidden_size": 12288, "intermediate_size": 28672,
        "num_hidden_layers": 88, "num_attention_heads": 96, "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
}  # fmt: skip
RAM, DRIVES = (64, 128, 256, 512), (1, 4)
HEAD = (
    "model", "RAM", "drives", "tokens/s", "bytes a parameter, drive", "binds", "a step's tokens as",
)  # fmt: skip


def case_of(target: Target, cut: Cut, ram: int, drives: int, tokens: int, length: int) -> Case:
    """One model on one machine, all tokens in one micro-batch."""
    config = load_config({"nvme_path": "/nvme"}).with_sliced_logits()
    names = ("disk_read", "disk_write", "disk_mixed")
    rates = replace(NOMINAL, **{name: drives * getattr(NOMINAL, name) for name in names})
    machine = PlanMachine("table", ram * GIB, 24 * GIB, drives * 4096 * GIB, 16, rates)
    groups = groups_of(target.module, config)
    made = max(p.nbytes for p in target.module.parameters())
    return case_for(
        target, cut, groups, config, machine, tokens, recompute=False, made=made, length=length
    )


def row(name: str, found: Priced | None, ram: int, drives: int) -> list[str]:
    """The cells of one machine."""
    if found is None:
        return [name, f"{ram} GiB", str(drives), "does not fit", "", "", ""]
    moved, count = found.plan.predicted_bytes, max(found.plan.num_trained, 1)
    drive = (moved["disk_read"] + moved["disk_write"]) / count
    line = BatchSchedule.of(found.case).line(num_blocks(found.case.units))
    return [
        name, f"{ram} GiB", str(drives), f"{found.tokens_per_s:,.0f}", f"{drive:.0f}",
        found.cost.binds, line.removesuffix(", logits in slices"),
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sample")
    arguments = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n| " + " | ".join("---" for _ in HEAD) + " |")
    for name, facts in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(facts), encoding="utf-8")
            target = find_target(str(path))
        config = load_config({})
        cut = cut_model(target.module, config, groups_of(target.module, config), None)
        for ram in RAM:
            for drives in DRIVES:
                length = min(arguments.sequence, arguments.tokens)
                case = case_of(target, cut, ram, drives, arguments.tokens, length)
                samples = arguments.tokens // length
                chosen = choose_schedule(case, BatchSchedule(), samples)
                print("| " + " | ".join(row(name, chosen.best, ram, drives)) + " |", flush=True)


if __name__ == "__main__":
    main()
