#!/usr/bin/env python3
"""Compare loss curves of one model trained with different formats of moments, and with Muon.

    python tools/bench_quality.py --steps 1000 --context 64            all variants, then the plot
    python tools/bench_quality.py --variant 8bit --steps 1000 ...      one variant, in this process
    python tools/bench_quality.py --plot-only                          the plot of existing results

The model of examples/gpt.py (bf16 with split masters, or `--precision fp32`, which is faster on
small CPUs) is trained on the source of the standard library, with all state in RAM. All variants
have the same seed, data and order. Each writes `<out>/<variant>.json` (losses in bits per byte),
and a checkpoint every `--save-every` steps, from which the same command resumes, also with more
`--steps`. `quality.svg` and `quality.json` are the summary. Exit code 0; 1 if a loss is not finite
or fp32 is missing, 2 if a checkpoint has other settings.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "examples"))

# Optimizers by name: AdamW by format of moments, and Muon with the learning rate of AdamW.
VARIANTS: dict[str, dict[str, Any]] = {
    form: {"type": "AdamW", "betas": [0.9, 0.95], "moments": form}
    for form in ("fp32", "bf16", "bf16_stochastic", "8bit")
}
VARIANTS["muon"] = {
    "type": "Muon", "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01,
    "adam_betas": [0.9, 0.95],
}  # fmt: skip
# Settings that must be equal in a checkpoint and the run that resumes from it.
FIXED = ("model", "precision", "context", "micro_batch", "lr", "warm_up", "clipping", "seed")
LAST = 100  # number of steps whose mean is the final loss


def main(argv: list[str] | None = None) -> int:
    """Run one variant, or each in a child process and then plot; return the exit code."""
    arguments = _parser().parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.variant is not None:
        return train(arguments, arguments.variant, _say)
    if not arguments.plot_only:
        given = sys.argv[1:] if argv is None else argv
        for variant in VARIANTS:
            command = [sys.executable, __file__, *given, "--variant", variant]
            code = subprocess.run(command, check=False).returncode
            if code:
                return code
    return plot(arguments.out)


def train(arguments: argparse.Namespace, variant: str, say: Callable[[str], None]) -> int:
    """Train one variant to `--steps`, resuming from its checkpoint if there is one."""
    import corpus
    import presets
    import torch

    import infinity

    shape = presets.shape_of(arguments.model, arguments.context)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.precision]
    model = presets.build(shape, dtype, arguments.seed)
    in_ram = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
    rule = {**VARIANTS[variant], "lr": arguments.lr}
    if variant == "muon":
        rule["adam_lr"] = arguments.lr
    config = {
        "precision": arguments.precision, "placement": in_ram, "optimizer": rule,
        "gradient_clipping": arguments.clipping, "seed": arguments.seed,
    }  # fmt: skip

    def warm_up(optimizer: Any) -> Any:
        schedules = torch.optim.lr_scheduler
        return schedules.LinearLR(optimizer, start_factor=0.05, total_iters=arguments.warm_up)

    source = corpus.batches(
        corpus.standard_library().train, arguments.seed, arguments.micro_batch, shape.context
    )
    settings = {name: getattr(arguments, name) for name in FIXED}
    saved = arguments.out / variant
    losses: list[float] = []
    with infinity.initialize(model, config, lr_scheduler=warm_up, device="cpu")[0] as engine:
        if saved.exists():
            client_state = engine.load_checkpoint(saved)[1] or {}
            if client_state["settings"] != settings:
                say(
                    f"{saved} was made with {client_state['settings']}; remove it, or use another "
                    "--out"
                )
                return 2
            losses = list(client_state["losses"])
            source.position = len(losses)
            say(f"{variant}: going on from step {len(losses)}")
        started, done = time.perf_counter(), len(losses)
        while len(losses) < arguments.steps:
            loss = engine(*next(source))
            losses.append(loss.item() / math.log(2))
            if not math.isfinite(losses[-1]):
                say(f"{variant}: the loss of step {len(losses)} is {losses[-1]}")
                return 1
            engine.backward(loss)
            engine.step()
            step = len(losses)
            if step % arguments.save_every == 0 or step == arguments.steps:
                rate = (time.perf_counter() - started) / (step - done)
                say(f"{variant}: step {step}, {losses[-1]:.4f} bits per byte, {rate:.2f} s a step")
                state = {"settings": settings, "losses": losses}
                engine.save_checkpoint(saved, client_state=state, keep_last=1, wait=True)
                result = {"variant": variant, **state}
                _write(arguments.out / f"{variant}.json", json.dumps(result))
    return 0


def plot(out: Path) -> int:
    """Write plot and summary of the results in `out`; variants except fp32 may be missing."""
    from quality_plot import draw

    paths = {v: out / f"{v}.json" for v in VARIANTS if (out / f"{v}.json").exists()}
    runs = {variant: json.loads(path.read_text()) for variant, path in paths.items()}
    if "fp32" not in runs:
        _say(f"{out} has no fp32.json to compare with")
        return 1
    settings = runs["fp32"]["settings"]
    runs = {v: run for v, run in runs.items() if run["settings"] == settings}
    losses = {variant: run["losses"] for variant, run in runs.items()}
    steps = min(map(len, losses.values()))
    num_last = min(LAST, steps)
    summary: dict[str, Any] = {"settings": settings, "steps": steps, "last": num_last}
    summary["variants"] = {}
    exact = sum(losses["fp32"][steps - num_last : steps]) / num_last
    for variant, values in losses.items():
        mean = sum(values[steps - num_last : steps]) / num_last
        gaps = [abs(a - b) for a, b in zip(values[:steps], losses["fp32"], strict=False)]
        summary["variants"][variant] = {
            "bits_per_byte_at_the_end": mean,
            "difference_from_fp32": mean - exact,
            "mean_absolute_difference_per_step": sum(gaps) / steps,
        }
    title = f"{settings['model']}, {settings['micro_batch']} x {settings['context']} tokens a step"
    _write(out / "quality.svg", draw(losses, title, window=max(1, min(25, steps // 4))))
    _write(out / "quality.json", json.dumps({**summary, "losses": losses}))
    _say(json.dumps(summary, indent=2))
    return 0


def _write(path: Path, text: str) -> None:
    path.with_suffix(path.suffix + ".tmp").write_text(text)
    os.replace(path.with_suffix(path.suffix + ".tmp"), path)


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--variant", choices=VARIANTS, help="only this one, in this process; no plot")
    add("--plot-only", action="store_true", help="train nothing")
    add("--out", type=Path, default=ROOT / "build" / "quality", metavar="DIR")
    add("--steps", type=int, default=1000, metavar="N")
    add("--save-every", type=int, default=100, metavar="N", help="steps between checkpoints")
    add("--model", default="gpt-100m", help="a preset of examples/gpt.py (default: %(default)s)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="of the model")
    add("--context", type=int, default=64, metavar="N", help="tokens a sequence")
    add("--micro-batch", type=int, default=2, metavar="N", help="sequences a step")
    add("--lr", type=float, default=3e-4)
    add("--warm-up", type=int, default=50, metavar="N", help="steps")
    add("--clipping", type=float, default=1.0)
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
