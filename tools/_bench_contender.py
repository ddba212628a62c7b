"""One contender of `bench_step.py`, alive in a child process and stepping only when told to.

Protocol: JSON lines. The first line on stdin is the job; then {"do": "turn", "steps": n},
{"do": "phases"} or {"do": "close"}; every request gets one line on stdout.

Note: what a turn measures. `engine.step()` returns while its sweep still runs, and between turns
others must have the machine to themselves. So a turn takes one step more than it times (the time
of a step is from one return of step() to the next, and each contains exactly one whole update),
and ends by waiting for what is pending, untimed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import gpt
from _plain import DTYPES, PlainTorch, compute_device
from _process import peak_rss_bytes

import infinity
from infinity.config import load_config

HYPER_PARAMETERS = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
HOMES = {
    "infinity_ram": {"weights": "host", "moments": "host", "gradients": "host"},
    "infinity_disk": {"weights": "disk", "moments": "disk", "gradients": "host"},
}


class Contender:
    """Steps through the same random batches as every other contender."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        shape = gpt.shape_of(job["model"], job["context"], job["checkpointing"])
        self.vocab_size = shape.vocab_size
        self.device = compute_device()
        self.model = gpt.build_gpt(shape, DTYPES[job["precision"]], seed=0)
        self.generator = torch.Generator().manual_seed(1)
        self.last_loss = float("nan")

    def batch(self) -> list[tuple[Tensor, Tensor]]:
        """Return one step's micro-batches."""
        shape = (self.job["micro_batches"], 2, self.job["rows"], self.job["context"])
        tokens = torch.randint(0, self.vocab_size, shape, generator=self.generator)
        tokens = tokens.to(self.device)
        return [(part[0], part[1]) for part in tokens]

    def step(self) -> None:
        """Do one whole training step."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until nothing runs in the background any more."""

    def facts(self) -> dict[str, Any]:
        """Return what is known after a turn."""
        return {"peak_rss_bytes": peak_rss_bytes(), "loss": self.last_loss}

    def phases(self) -> dict[str, float]:
        """Return the times of one step in parts; only the engine with all in RAM has them."""
        raise NotImplementedError

    def close(self) -> None:
        """End."""

    def turn(self, num_steps: int) -> dict[str, Any]:
        """Take one step untimed and `num_steps` timed."""
        self.step()
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - started)
        facts = self.facts()
        self.settle()
        return {"step_s": times, **facts}


class TorchInRam(Contender):
    """Plain PyTorch."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        model = self.model.to(self.device)
        self.plain = PlainTorch(model, load_config(engine_config(job, "infinity_ram")))

    def step(self) -> None:
        """Do one whole training step."""
        self.last_loss = self.plain.step(self.batch())[-1]


class Infinity(Contender):
    """Our engine, with the homes that the contender's name stands for."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        config = load_config(engine_config(job, job["contender"]))
        self.engine, *_ = infinity.initialize(model=self.model, config=config, device=self.device)

    def step(self) -> None:
        """Do one whole training step."""
        for tokens, targets in self.batch():
            loss = self.engine(tokens, targets)
            self.last_loss = loss.item()
            self.engine.backward(loss)
            self.engine.step()

    def settle(self) -> None:
        """Wait until every update is home."""
        self.engine.settle()

    def facts(self) -> dict[str, Any]:
        """Return what is known after a turn."""
        report = self.engine.last_report
        return super().facts() | {
            "moved_bytes": dict(report.moved),
            "predicted_bytes": dict(self.engine.plan.predicted_bytes),
            "stall_s": dict(report.stall_s),
            "surprises": report.surprises,
            "unified": self.engine.plan.unified,
            "tier_bytes": dict(self.engine.plan.tier_bytes),
        }

    def phases(self) -> dict[str, float]:
        """Time forward, backward and update of one step, each alone."""
        self.engine.settle()
        forward_s = backward_s = 0.0
        batch = self.batch()
        for tokens, targets in batch:
            started = time.perf_counter()
            loss = self.engine(tokens, targets)
            loss.item()
            ended = time.perf_counter()
            forward_s += ended - started
            self.engine.backward(loss)
            backward_s += time.perf_counter() - ended
            started = time.perf_counter()
            self.engine.step()
        self.engine.settle()
        update_s = time.perf_counter() - started
        return {
            "forward_s": forward_s / len(batch),
            "backward_s": backward_s / len(batch),
            "update_s": update_s,
        }

    def close(self) -> None:
        """Remove the scratch files."""
        self.engine.close()


class DeepSpeed(Contender):
    """The peer: ZeRO-3 with parameters and optimizer on NVMe, with the settings that run."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=list(self.model.parameters()),
            config=deepspeed_config(job),
        )

    def step(self) -> None:
        """Do one whole training step."""
        for tokens, targets in self.batch():
            loss = self.engine(tokens, targets)
            self.last_loss = loss.item()
            self.engine.backward(loss)
            self.engine.step()

    def close(self) -> None:
        """Free its swap files."""
        self.engine.destroy()


CONTENDERS = {
    "torch_ram": TorchInRam,
    "infinity_ram": Infinity,
    "infinity_disk": Infinity,
    "deepspeed_nvme": DeepSpeed,
}


def engine_config(job: dict[str, Any], contender: str) -> dict[str, Any]:
    """Return the engine's config for one contender."""
    config: dict[str, Any] = {
        "precision": job["precision"],
        "optimizer": {"type": "AdamW", **HYPER_PARAMETERS},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": job["micro_batches"],
        "homes": HOMES[contender],
    }
    if contender == "infinity_disk":
        config["nvme_path"] = job["path"]
        if job["host_budget"] is not None:  # what fits in it stays in RAM: the plan chooses
            config["budget"] = {"host": job["host_budget"]}
            del config["homes"]
    return config


def deepspeed_config(job: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's config: its defaults crash here, these values run (look-ahead off)."""
    path = str(Path(job["path"]) / "deepspeed")
    optimizer = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 4,
                 "pipeline_read": False, "pipeline_write": False}  # fmt: skip
    parameters = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 12,
                  "buffer_size": int(3e7), "max_in_cpu": 0}  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": job["rows"],
        "gradient_accumulation_steps": job["micro_batches"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": job["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": HYPER_PARAMETERS},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": int(3e7),
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": int(1e5),
            "reduce_bucket_size": int(5e7),
            "offload_optimizer": optimizer,
            "offload_param": parameters,
        },
        "aio": {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True},
    }  # fmt: skip


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until "close" or the end of input."""

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    job = json.loads(requests.readline())
    started = time.perf_counter()
    contender = CONTENDERS[job["contender"]](job)
    try:
        for _ in range(job["warmup"]):
            contender.step()
        contender.settle()
        reply({"init_s": time.perf_counter() - started, **contender.facts()})
        for line in requests:
            request = json.loads(line)
            if request["do"] == "turn":
                reply(contender.turn(request["steps"]))
            elif request["do"] == "phases":
                reply(contender.phases())
            else:
                break
    finally:
        contender.close()


def main() -> int:
    """Serve; anything that libraries print goes to stderr, so that replies stay readable."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
