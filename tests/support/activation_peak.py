"""Comparison of the estimate of `plan.activations` with the memory used in training.

`python -m support.activation_peak`, in tests/, prints the table of docs/benchmarks: each case in
plain torch, with live storages counted, and in a process that trains two steps with everything in
RAM, where the engine measures what a step held beyond its persistent state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.config.schema import load_config
from infinity.model.partition import Partition, groups_of, partition_model
from infinity.model.targets import target_of
from infinity.plan.activations import ActivationModel, Activations

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import llama
import presets
from support.live_bytes import LiveBytes

MIB = 1 << 20
IN_RAM = {"weights": "device", "optimizer_state": "host", "gradients": "host"}
_GPT = gpt.GPTConfig(vocab_size=512, context=1024, num_layers=6, num_heads=8, width=512)
_LARGE_VOCAB = gpt.GPTConfig(vocab_size=32_000, context=1024, num_layers=3, num_heads=4, width=256)
_LLAMA = llama.LlamaConfig(512, 1024, 6, 8, 2, 512, 1408)
# For bf16, which most processors emulate: some 50 times as slow as fp32.
_SMALL = gpt.GPTConfig(vocab_size=512, context=256, num_layers=4, num_heads=4, width=256)
_SMALL_LARGE_VOCAB = gpt.GPTConfig(
    vocab_size=8_000, context=256, num_layers=3, num_heads=2, width=128
)
_SMALL_LLAMA = llama.LlamaConfig(512, 256, 4, 4, 2, 256, 704)
# name -> shape, precision, recompute blocks, tokens, rows
CASES = {
    "gpt, 256 tokens": (_GPT, "fp32", False, 256, 1),
    "gpt, 1024 tokens": (_GPT, "fp32", False, 1024, 1),
    "gpt, 4096 tokens": (_GPT, "fp32", False, 4096, 4),
    "gpt, 1024 tokens, recomputed": (_GPT, "fp32", True, 1024, 1),
    "gpt, 4096 tokens, recomputed": (_GPT, "fp32", True, 4096, 4),
    "gpt, 1024 tokens, bf16": (_GPT, "bf16", False, 1024, 1),
    "32,000 words": (_LARGE_VOCAB, "fp32", False, 1024, 1),
    "32,000 words, recomputed, bf16": (_LARGE_VOCAB, "bf16", True, 1024, 1),
    "gated, grouped queries": (_LLAMA, "fp32", False, 1024, 1),
    "gated, grouped queries, recomputed": (_LLAMA, "fp32", True, 1024, 1),
    "gated, grouped queries, bf16": (_LLAMA, "bf16", False, 1024, 1),
    "small gpt, bf16": (_SMALL, "bf16", False, 256, 1),
    "8,000 words, recomputed, bf16": (_SMALL_LARGE_VOCAB, "bf16", True, 256, 1),
    "small, gated, grouped queries, bf16": (_SMALL_LLAMA, "bf16", False, 256, 1),
}


def build(name: str) -> nn.Module:
    """Return the model of a case."""
    shape, precision, recompute, _, _ = CASES[name]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return presets.build(replace(shape, checkpointing=recompute), dtype, seed=1)


def batch(name: str) -> torch.Tensor:
    """Return the tokens of a case."""
    shape, _, _, tokens, rows = CASES[name]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocab_size, (rows, tokens // rows), generator=generator)


def cut(name: str, model: nn.Module) -> Partition:
    """Return the units of a case."""
    config = load_config({"precision": CASES[name][1]})
    return partition_model(model, config, groups_of(model, config), None)


def estimated(name: str, model: nn.Module) -> Activations:
    """Return the estimate of the plan."""
    _, _, recompute, tokens, _ = CASES[name]
    target = target_of("", model, {})
    layouts = cut(name, model).layouts
    shape = ActivationModel(layouts, lookups=target.lookups, heads=target.heads)
    return shape.of(tokens, recompute="all" if recompute else 0)


def counted(name: str, model: nn.Module) -> int:
    """Return the peak of live bytes in a forward and backward; gradients are freed by unit."""
    units = cut(name, model)
    for unit in units.units:
        _free_gradients_together([units.parameters[i] for i in unit.parameters])
    tokens = batch(name)
    with LiveBytes([tokens, *model.parameters(), *model.buffers()]) as live:
        model(tokens, tokens).backward()
    return live.peak


def _free_gradients_together(members: list[nn.Parameter]) -> None:
    missing = {id(p) for p in members}

    def arrived(parameter: torch.Tensor) -> None:
        missing.discard(id(parameter))
        if not missing:
            for p in members:
                p.grad = None

    for p in members:
        p.register_post_accumulate_grad_hook(arrived)


def trained(name: str) -> int:
    """Return the bytes that the engine measured for the activations of a step on this CPU."""
    config = {"precision": CASES[name][1], "placement": IN_RAM}
    tokens = batch(name)
    with infinity.initialize(build(name), config, device="cpu")[0] as engine:
        for _ in range(2):
            engine.backward(engine(tokens, tokens))
            engine.step()
        report = engine.last_report
        assert report is not None
        return report.memory["activations"]


def main() -> None:
    """Print one case as JSON, or the table of all."""
    if sys.argv[1:]:
        name = sys.argv[1]
        measured = trained(name)
        model = build(name)
        print(json.dumps([estimated(name, model).total, counted(name, model), measured]))
        return
    print("| case | estimated MiB | counted MiB | error | a process, MiB | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in CASES:
        command = [sys.executable, "-m", "support.activation_peak", name]
        completed = subprocess.run(command, capture_output=True, text=True, check=True)
        planned, counted_bytes, process_bytes = json.loads(completed.stdout.splitlines()[-1])
        print(
            f"| {name} | {planned / MIB:.0f} | {counted_bytes / MIB:.0f} "
            f"| {planned / counted_bytes - 1:+.0%} | {process_bytes / MIB:.0f} "
            f"| {planned / process_bytes - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
