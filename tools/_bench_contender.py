"""One contender of `bench_step.py`, alive in a child process and stepping only when told to.

Protocol: JSON lines. The first line on stdin is the job; then {"do": "turn", "steps": n},
{"do": "phases"}, {"do": "shares"} or {"do": "close"}; every request gets one line on stdout.

Note: what a turn measures. `engine.step()` returns while its sweep still runs, and between turns
others must have the machine to themselves. So a turn takes one step more than it times (the time
of a step is from one return of step() to the next, and each contains exactly one whole update),
and ends by waiting for what is pending, untimed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import presets
from _plain import DTYPES, PlainTorch
from _process import peak_rss_bytes

import infinity
from infinity.config import load_config
from infinity.trace.reader import read_timeline
from infinity.trace.report import step_data
from infinity.trace.shares import Shares

HYPER_PARAMETERS = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
HOMES = {
    "infinity_ram": {"weights": "host", "moments": "host", "gradients": "host"},
    "infinity_disk": {"weights": "disk", "moments": "disk", "gradients": "host"},
}


class Contender:
    """Steps through the same random batches as every other contender."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.shape = presets.shape_of(job["model"], job["context"], job["checkpointing"])
        self.device = torch.device(job["device"])
        self.generator = torch.Generator().manual_seed(1)
        self.last_loss = float("nan")

    def build(self) -> nn.Module:
        """The model; the same weights for all that build it on the same device."""
        return presets.build(self.shape, DTYPES[self.job["precision"]], seed=0)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self) -> list[tuple[Tensor, Tensor]]:
        """Return one step's micro-batches."""
        shape = (self.job["micro_batches"], 2, self.job["rows"], self.job["context"])
        tokens = torch.randint(0, self.shape.vocab_size, shape, generator=self.generator)
        tokens = tokens.to(self.device)
        return [(part[0], part[1]) for part in tokens]

    def step(self) -> None:
        """Do one whole training step."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until nothing runs in the background any more."""

    def facts(self) -> dict[str, Any]:
        """Return what is known after a turn."""
        facts = {"peak_rss_bytes": peak_rss_bytes(), "loss": self.last_loss}
        if self.device.type == "cuda":
            facts["peak_device_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return facts

    def phases(self) -> dict[str, float]:
        """Return the times of one step in parts: forward, backward, update."""
        raise NotImplementedError

    def shares(self) -> dict[str, Any]:
        """Take the steps that are traced; who was busy for how much of them. Empty without one."""
        return {}

    def close(self) -> None:
        """End."""

    def turn(self, num_steps: int) -> dict[str, Any]:
        """Take one step untimed and `num_steps` timed."""
        self.step()
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            self.step()  # reads the loss: the device has finished the forward by then
            times.append(time.perf_counter() - started)
        facts = self.facts()
        self.settle()
        return {"step_s": times, **facts}


class TorchInRam(Contender):
    """Plain PyTorch."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        with self.device:  # built where it stays
            model = self.build()
        config = load_config(engine_config(job | {"device": "cpu"}, "infinity_ram"))
        self.plain = PlainTorch(model, config)

    def step(self) -> None:
        """Do one whole training step."""
        self.last_loss = self.plain.step(self.batch())[-1]

    def settle(self) -> None:
        """Wait for the device."""
        self.synchronize()

    def phases(self) -> dict[str, float]:
        """Forward and backward of one micro-batch, and what a step has left."""
        parts: list[float] = []
        tokens, targets = self.batch()[0]
        for _ in range(2):  # the first brings gradients into being
            self.synchronize()
            times = [time.perf_counter()]
            loss = self.plain.model(tokens, targets)
            self.synchronize()
            times.append(time.perf_counter())
            loss.backward()
            self.synchronize()
            times.append(time.perf_counter())
            parts = [b - a for a, b in itertools.pairwise(times)]
        started = time.perf_counter()
        self.step()
        self.synchronize()
        step_s = time.perf_counter() - started
        update_s = max(step_s - self.job["micro_batches"] * sum(parts), 0.0)
        return {"forward_s": parts[0], "backward_s": parts[1], "update_s": update_s}


class Infinity(Contender):
    """Our engine, with the homes that the contender's name stands for."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.num_steps = 0
        config = load_config(engine_config(job, job["contender"]))
        with infinity.Init():  # it may be larger than RAM
            model = self.build()
        self.engine, *_ = infinity.initialize(model=model, config=config, device=self.device)

    def step(self) -> None:
        """Do one whole training step."""
        for tokens, targets in self.batch():
            loss = self.engine(tokens, targets)
            self.last_loss = loss.item()
            self.engine.backward(loss)
            self.engine.step()
        self.num_steps += 1

    def shares(self) -> dict[str, Any]:
        """Steps beyond the timed ones: nothing is recorded before. The trace stays for a person."""
        first, last = self.job["trace_steps"]
        while self.num_steps <= last:  # it is closed with the step after its last
            self.step()
        self.settle()
        whole = Shares(read_timeline(trace_of(self.job))).whole
        assert whole is not None
        assert whole.name == f"all {last + 1 - first} steps"
        found = step_data(whole)
        return {key: found[key] for key in ("busy_share", "binds", "verdict")} | {
            "gpu_idle_share": found["idle_share"]
        }

    def settle(self) -> None:
        """Wait until every update is home."""
        self.engine.settle()
        self.synchronize()

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
        self.synchronize()
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
        self.num_steps += 1
        self.engine.settle()
        self.synchronize()
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
    """The peer: ZeRO-3 with parameters and optimizer on NVMe or in RAM, with settings that run."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo" if self.device.type == "cpu" else "nccl")
        model = self.build()
        config = deepspeed_config(job, max(p.numel() for p in model.parameters()))
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
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
    "deepspeed_cpu": DeepSpeed,
}


def trace_of(job: dict[str, Any]) -> Path:
    """The file of this contender's trace."""
    return Path(job["traces"]) / f"trace-{job['contender']}.json"


def engine_config(job: dict[str, Any], contender: str) -> dict[str, Any]:
    """Return the engine's config for one contender."""
    config: dict[str, Any] = {
        "precision": job["precision"],
        "optimizer": {"type": "AdamW", **HYPER_PARAMETERS},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": job["micro_batches"],
        "homes": HOMES[contender],
        "trace": str(trace_of(job)),
        "trace_steps": job["trace_steps"],
    }
    if job["device"] == "cuda":  # what its budget holds rests on the device: the plan chooses
        config["budget"] = {"device": job["device_budget"]} if job["device_budget"] else {}
        if contender == "infinity_ram":
            del config["homes"]
    if contender == "infinity_disk":
        config["nvme_path"] = job["path"]
        if job["host_budget"] is not None:  # what fits in it stays in RAM: the plan chooses
            config["budget"] = config.get("budget", {}) | {"host": job["host_budget"]}
            del config["homes"]
    return config


def deepspeed_config(job: dict[str, Any], largest: int) -> dict[str, Any]:
    """Return DeepSpeed's config; `largest` is the number of elements of the largest parameter.

    On a CPU its defaults crash, these values run (look-ahead off); on a GPU they are its defaults,
    with what its users set for offloading.
    """
    path = str(Path(job["path"]) / "deepspeed")
    if job["contender"] == "deepspeed_cpu":
        optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
        parameters: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    else:
        optimizer = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 4,
                     "pipeline_read": False, "pipeline_write": False}  # fmt: skip
        parameters = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 12,
                      "buffer_size": max(int(3e7), largest), "max_in_cpu": 0}  # fmt: skip
    zero: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "offload_optimizer": optimizer,
        "offload_param": parameters,
    }
    if job["device"] == "cpu":
        zero |= {
            "overlap_comm": False,
            "sub_group_size": int(3e7),
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": int(1e5),
            "reduce_bucket_size": int(5e7),
        }
    return {
        "train_micro_batch_size_per_gpu": job["rows"],
        "gradient_accumulation_steps": job["micro_batches"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": job["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": HYPER_PARAMETERS},
        "zero_optimization": zero,
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
            elif request["do"] == "shares":
                reply(contender.shares())
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
