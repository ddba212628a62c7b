"""Plain PyTorch baseline: the same training with all state in RAM.

bf16: a bf16 model, fp32 master and moments, fused AdamW one parameter at a time, so that only one
fp32 gradient exists at once: the leanest plain implementation. With several micro-batches
gradients are summed in fp32, as in the engine. fp32: the model is its own master.

As a program it reads one JSON job from stdin, prints a line when it is ready, and then runs the
number of steps given by each further line, with one JSON line per step: so the example can measure
it in a separate process, in turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _process import peak_rss_bytes
from torch import Tensor, nn

from infinity.config.schema import Config, load_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compute_device() -> torch.device:
    """Return the device that the examples compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bytes_per_parameter(config: Config) -> int:
    """Return the RAM that `PlainTorch` needs per parameter, activations not counted.

    Master, two moments and, with several micro-batches, sums of gradients in fp32; in bf16 also
    the weights and, with one micro-batch, their gradients.
    """
    if config.precision == "fp32":
        return 16
    return 18 if config.gradient_accumulation_steps > 1 else 16


class PlainTorch:
    """A training step without any engine: forward, backward, clip, AdamW."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model = model.train()
        self._num_micro_batches = config.gradient_accumulation_steps
        self._clipping = config.gradient_clipping
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        kind = getattr(torch.optim, config.optimizer.type, None)
        if kind is None:
            raise ValueError(f"torch has no {config.optimizer.type}")
        options = config.optimizer.parameters()
        self._optimizers = [kind([master], fused=True, **options) for master in self._masters]
        self._lr_source = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
        self._scheduler: Any = None
        if config.scheduler is not None:
            scheduler = getattr(torch.optim.lr_scheduler, config.scheduler.type)
            self._scheduler = scheduler(self._lr_source, **config.scheduler.params)
        self._sums_in_fp32 = self._num_micro_batches > 1
        if self._sums_in_fp32:
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.register_post_accumulate_grad_hook(_add_to(master))

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Train on one batch and return the loss of each micro-batch."""
        losses = []
        for tokens, targets in micro_batches:
            loss = self.model(tokens, targets)
            losses.append(loss.item())
            (loss / self._num_micro_batches).backward()
        self._update()
        return losses

    @torch.no_grad()
    def _update(self) -> None:
        used = [
            (parameter, master, optimizer)
            for parameter, master, optimizer in zip(
                self._parameters, self._masters, self._optimizers, strict=True
            )
            if parameter.grad is not None or master.grad is not None
        ]
        gradients = [p.grad if p.grad is not None else m.grad for p, m, _ in used]
        scale = torch.tensor(1.0)
        if self._clipping:
            norm = nn.utils.get_total_norm([g for g in gradients if g is not None]).float()
            scale = torch.clamp(self._clipping / (norm + 1e-6), max=1.0)
        lr = self._lr_source.param_groups[0]["lr"]
        for parameter, master, optimizer in used:
            if parameter.grad is not None and master is not parameter:
                master.grad = parameter.grad.float()
            assert master.grad is not None
            master.grad.mul_(scale)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            if master is not parameter:
                parameter.copy_(master)
            parameter.grad = None
            if self._sums_in_fp32 and master is not parameter:
                master.grad.zero_()
            else:
                master.grad = None
        self._lr_source.step()
        if self._scheduler is not None:
            self._scheduler.step()


def _add_to(master: nn.Parameter) -> Any:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return hook


def run_job(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train as `job` describes; yield an empty dict when ready, then loss and time of each step."""
    import corpus
    import presets

    config = load_config(job["config"])
    text = corpus.one_file(Path(job["text"])) if job["text"] else corpus.standard_library()
    shape = presets.shape_of(job["model"], job["context"])
    model = presets.build(shape, DTYPES[config.precision], job["seed"])
    device = compute_device()
    plain = PlainTorch(model.to(device), config)
    source = corpus.batches(text.train, job["seed"], job["micro_batch"], job["context"])
    yield {}
    for _ in range(job["num_steps"]):
        started = time.perf_counter()
        pairs = [next(source) for _ in range(config.gradient_accumulation_steps)]
        losses = plain.step([(x.to(device), y.to(device)) for x, y in pairs])
        yield {
            "loss": sum(losses) / len(losses),
            "step_s": time.perf_counter() - started,
            "peak_rss_bytes": peak_rss_bytes(),
        }


def main() -> int:
    """Read a job, run it and print every step; exit quietly when the reader is gone."""
    job = json.loads(sys.stdin.readline())
    try:
        steps = run_job(job)
        print(json.dumps(next(steps)), flush=True)
        for line in sys.stdin:
            for facts in islice(steps, int(line)):
                print(json.dumps(facts), flush=True)
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
