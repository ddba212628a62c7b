"""Contender of `bench_step.py`: a child process that runs steps on request.

Protocol: JSON lines. The first line on stdin is the job; then {"do": "turn", "steps": n},
{"do": "phases"}, {"do": "shares"} or {"do": "close"}. Every request except "close" is answered by
one line on stdout.

[Note: timing of a turn]
`engine.step()` returns while its optimizer pass still runs, and between turns the machine must be
idle for other contenders. A turn therefore runs one untimed step first; the time of a step is from
one return of step() to the next, which contains exactly one full update. It ends with an untimed
wait for pending work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
from _plain import DTYPES, PlainTorch
from _process import peak_rss_bytes
from torch import Tensor, nn

import infinity
from infinity.common.sizes import parse_size
from infinity.config.schema import Config, load_config
from infinity.model.meta_init import remember_values
from infinity.model.partition import PROCESS_BASE_BYTES
from infinity.plan.machine import read_machine
from infinity.plan.plan_machine import PlanMachine
from infinity.profiling.calibration import KnownRates, cached_rates
from infinity.profiling.trace_reader import read_timeline
from infinity.profiling.trace_shares import Shares, step_data
from infinity.storage.devices import resolve_device
from step.bound import compute_in, links_in_pass
from step.case import device_bytes, priced_of, recomputed_share, schedule_line, unscheduled_job
from step.config import HYPER_PARAMETERS, deepspeed_config, engine_config, trace_of
from step.cpu import cpu_seconds
from step.model import filled, outline, shape_of, values_of

STUCK_S = 75.0
PR_SET_PDEATHSIG = 1  # prctl(2)


class Contender:
    """Base of contenders; all train on the same random batches."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.shape = shape_of(job)
        on_gpu = job["device"] == "cuda"  # some functions of torch.cuda need an index
        index = int(os.environ.get("LOCAL_RANK", "0")) if on_gpu else None
        self.device = torch.device(job["device"], index)
        self.generator = torch.Generator().manual_seed(1 + job.get("rank", 0))
        self.last_loss = float("nan")

    def build(self, device: torch.device) -> nn.Module:
        """Return the model on `device`, with the same weights for all contenders."""
        return filled(outline(self.job), device)

    def synchronize(self) -> None:
        """Wait for the device, for exact times."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of the next step."""
        shape = (self.job["micro_batches"], 2, self.job["rows"], self.job["context"])
        tokens = torch.randint(0, self.shape.vocab_size, shape, generator=self.generator)
        tokens = tokens.to(self.device)
        return [(part[0], part[1]) for part in tokens]

    def step(self) -> None:
        """Run one training step."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for background work."""

    def facts(self) -> dict[str, Any]:
        """Return facts for the report after a turn."""
        facts = {"peak_rss_bytes": peak_rss_bytes(), "loss": self.last_loss}
        if self.device.type == "cuda":
            facts["peak_device_bytes"] = torch.cuda.max_memory_allocated(self.device)
            facts["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
            facts["alloc_retries"] = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        return facts

    def plans(self) -> dict[str, Any]:
        """Return the inputs of a bound: path of the pickled plan, and rates. Empty without."""
        return {}

    def phases(self) -> dict[str, float]:
        """Return seconds of forward, backward and update of one step."""
        raise NotImplementedError

    def shares(self) -> dict[str, Any]:
        """Run the traced steps and return busy shares by resource. Empty without a trace."""
        return {}

    def close(self) -> None:
        """Release resources."""

    def turn(self, num_steps: int) -> dict[str, Any]:
        """Run one untimed and `num_steps` timed steps; see [Note: timing of a turn]."""
        self.step()
        times, before = [], cpu_seconds()
        for _ in range(num_steps):
            started = time.perf_counter()
            self.step()  # reads the loss, i.e. waits for the forward
            times.append(time.perf_counter() - started)
        used = cpu_seconds() - before
        facts = self.facts() | {"cpu_s": {name: s / num_steps for name, s in used.items()}}
        self.settle()
        return {"step_s": times, **facts}


class TorchInRam(Contender):
    """Plain PyTorch."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job | {"by_engine": False})
        model = self.build(self.device)
        if job["compile"]:
            for block in model.get_submodule("blocks").children():
                block.compile()
        overrides = {"device": "cpu", "offload": "none", "slices": 1, "compile": False}
        self.plain = PlainTorch(model, load_config(engine_config(job | overrides, "infinity_ram")))

    def step(self) -> None:
        """Run one training step."""
        self.last_loss = self.plain.step(self.batch())[-1]

    def settle(self) -> None:
        self.synchronize()

    def phases(self) -> dict[str, float]:
        """Time forward and backward of one micro-batch; the update is the rest of a step."""
        parts: list[float] = []
        tokens, targets = self.batch()[0]
        for _ in range(2):  # the first allocates gradients
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
    """The infinity engine with the placement of the contender's name."""

    rates: KnownRates | None = None

    def __init__(self, job: dict[str, Any]) -> None:
        job, config = self.configured(job)
        super().__init__(job)
        self.num_steps = 0
        if self.device.type == "cuda":
            if job["device_budget"] is not None:
                cap_device(parse_size(job["device_budget"]), self.device)
            with closing(
                resolve_device(self.device)
            ) as device:  # cached: measured once per machine
                self.rates = cached_rates(config.nvme_path, device, io=config.io)
            torch.cuda.reset_peak_memory_stats(self.device)
        model = outline(job)  # the model may exceed RAM
        remember_values(model, values_of(model))
        self.engine, *_ = infinity.initialize(model=model, config=config, device=self.device)

    def configured(self, job: dict[str, Any]) -> tuple[dict[str, Any], Config]:
        """Return the job and the configuration of the engine."""
        return job, load_config(engine_config(job, job["contender"]))

    def step(self) -> None:
        """Run one training step."""
        for tokens, targets in self.batch():
            loss = self.engine(tokens, targets)
            self.last_loss = loss.item()
            self.engine.backward(loss)
            self.engine.step()
        self.num_steps += 1

    def plans(self) -> dict[str, Any]:
        """Return the path of the plan, which is written here, and the measured rates or None."""
        path = Path(self.job["path"]) / f"plan-{self.job['contender']}.pickle"
        path.write_bytes(pickle.dumps(self.engine.plan))
        rates = None if self.rates is None else self.rates.rates.numbers()
        return {"plan": str(path), "rates": rates}

    def shares(self) -> dict[str, Any]:
        """Run the traced steps, which follow all timed ones. The trace file is kept."""
        first, last = self.job["trace_steps"]
        while self.num_steps <= last:  # the trace is closed by the step after its last
            self.step()
        self.settle()
        shares = Shares(read_timeline(trace_of(self.job)))
        total, num_steps = shares.total, last + 1 - first
        assert total is not None
        assert total.name == f"all {num_steps} steps"
        data = step_data(total)
        return {key: data[key] for key in ("busy_share", "binds", "verdict")} | {
            "gpu_idle_share": data["idle_share"],
            "traced_compute_s": compute_in(shares, num_steps * self.job["micro_batches"]),
            "links_bytes_per_s": links_in_pass(shares),
        }

    def settle(self) -> None:
        self.engine.settle()
        self.synchronize()

    def facts(self) -> dict[str, Any]:
        report = self.engine.last_report
        assert report is not None
        return super().facts() | {
            "rates_origin": self.engine.plan.rates_origin,
            "warnings": list(self.engine._components.device.warnings),  # without those of the disk
            "moved_bytes": dict(report.moved),
            "predicted_bytes": dict(self.engine.plan.predicted_bytes),
            "stall_s": dict(report.stall_s),
            "mispredictions": report.mispredictions,
            "unified": self.engine.plan.unified,
            "tier_bytes": dict(self.engine.plan.tier_bytes),
        }

    def phases(self) -> dict[str, float]:
        """Time forward, backward and update of one step without overlap; waits are excluded."""
        self.engine.settle()
        self.synchronize()
        forward_s = backward_s = 0.0
        batch = self.batch()
        for tokens, targets in batch:
            started = self._computed_s()
            loss = self.engine(tokens, targets)
            loss.item()
            ended = self._computed_s()
            forward_s += ended - started
            self.engine.backward(loss)
            backward_s += self._computed_s() - ended
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

    def _computed_s(self) -> float:
        """Return the clock minus stalls of the training thread."""
        return time.perf_counter() - sum(self.engine._components.transfers.stalled_s().values())

    def close(self) -> None:
        self.engine.close()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block, then the remaining parameters, with FSDP2's `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Fsdp2(Contender):
    """FSDP2 with CPU offload on one rank: fp32 masters and Adam's moments in RAM, updated there.

    Blocks are sharded separately, so that the next one is copied while one computes. The gradient
    norm is that of the local gradients, which are complete: no collective runs on the CPU.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        super().__init__(job | {"by_engine": False})
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
        dtype = DTYPES[job["precision"]]
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        }
        model = filled(outline(self.job | {"precision": "fp32"}), torch.device("cpu")).train()
        self.model: Any = sharded(model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER_PARAMETERS)

    def step(self) -> None:
        """Run one training step."""
        batch = self.batch()
        for index, micro_batch in enumerate(batch):
            self.model.set_requires_gradient_sync(index + 1 == len(batch))
            loss = self.model(*micro_batch)
            self.last_loss = loss.item()
            (loss / len(batch)).backward()
        gradients = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        self.synchronize()

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DeepSpeed(Contender):
    """DeepSpeed ZeRO-3 with parameters and optimizer state on NVMe or in RAM."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job | {"by_engine": False})
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo" if self.device.type == "cpu" else "nccl")
        model = self.build(torch.device("cpu"))
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=self.config(model)
        )

    def config(self, model: nn.Module) -> dict[str, Any]:
        return deepspeed_config(self.job, max(p.numel() for p in model.parameters()))

    def step(self) -> None:
        """Run one training step."""
        for tokens, targets in self.batch():
            loss = self.engine(tokens, targets)
            self.last_loss = loss.item()
            self.engine.backward(loss)
            self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class Planned(Infinity):
    """The infinity engine with placement and batch schedule of the plan."""

    def configured(self, job: dict[str, Any]) -> tuple[dict[str, Any], Config]:
        """Choose the fastest schedule that fits, by measured rates, and print it to stderr."""
        job = unscheduled_job(job)
        config = load_config(engine_config(job, job["contender"]))
        with closing(resolve_device(torch.device(job["device"]))) as device:
            known_rates = cached_rates(config.nvme_path, device, io=config.io)
            machine = PlanMachine.this_machine(
                config.nvme_path, device.memory_bytes(), known_rates.rates
            )
        self.rates = known_rates
        base = max(read_machine(config.nvme_path).process_rss_bytes, PROCESS_BASE_BYTES)
        estimate = priced_of(job, job["contender"], machine, base)
        line = schedule_line(estimate.case)
        print(f"infinity_plan: {line}; predicted {estimate.cost.seconds:.2f} s", file=sys.stderr)
        self.choice = {
            "predicted_s": estimate.cost.seconds,
            "predicted_device_bytes": device_bytes(estimate),
            "schedule": line,
            "recomputed": recomputed_share(estimate.case),
        }
        count = estimate.case.micro_batches
        return job | {"micro_batches": count, "rows": job["rows"] // count}, estimate.case.config

    def plans(self) -> dict[str, Any]:
        return super().plans() | self.choice


CONTENDERS: dict[str, type[Contender]] = {
    "torch_ram": TorchInRam,
    "infinity_ram": Infinity,
    "infinity_disk": Infinity,
    "infinity_layers": Infinity,
    "infinity_plan": Planned,
    "deepspeed_nvme": DeepSpeed,
    "deepspeed_cpu": DeepSpeed,
    "fsdp2": Fsdp2,
}


def cap_device(budget_bytes: int, device: torch.device) -> None:
    """Make torch's allocator raise for allocations beyond the budget."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(budget_bytes / total_bytes, 1.0), device)


def serve(
    requests: TextIO,
    replies: TextIO,
    contenders: Mapping[str, type[Contender]] = CONTENDERS,
    watched: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Answer requests until "close" or the end of input, each in a context of `watched`."""

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    job = json.loads(requests.readline())
    started = time.perf_counter()
    with watched():
        contender = contenders[job["contender"]](job)
    try:
        with watched():
            for _ in range(job["warmup"]):
                contender.step()
            contender.settle()
        reply({"init_s": time.perf_counter() - started, **contender.plans(), **contender.facts()})
        for line in requests:
            request = json.loads(line)
            if request["do"] == "close":
                break
            with watched():
                if request["do"] == "turn":
                    answer = contender.turn(request["steps"])
                else:
                    answer = getattr(contender, request["do"])()
            reply(answer)
    finally:
        with watched():
            contender.close()


@contextmanager
def stacks_when_stuck() -> Iterator[None]:
    """Context that dumps all stacks to stderr after `STUCK_S`, without ending the process."""
    faulthandler.dump_traceback_later(STUCK_S)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(contenders: Mapping[str, type[Contender]] = CONTENDERS) -> int:
    """Serve requests; stdout of libraries is redirected to stderr, to keep replies parsable.

    The process is killed when its parent ends, because it would keep the memory of the machine.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies, contenders, stacks_when_stuck)
    return 0


if __name__ == "__main__":
    sys.exit(main())
