"""Entry points of one rank in a separate process; torchrun's variables are in the environment.

A `job` has the parameters: the configuration, the path of the results, optionally the file store
through which the process group is made (`store`), and the rank to kill (`killed`).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import warnings
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from support import init_alone, process_memory
from support.internals import components
from support.models import CASES

import infinity
import infinity.distributed.context
from infinity.errors import InfinityError

WIDTH, NUM_LAYERS = 1024, 48  # of a stack of linear layers


def plain(job: dict[str, Any]) -> None:
    """Train the same case with plain torch: DDP, AdamW and gradient clipping, in fp32."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    case, config = CASES[job["case"]], job["config"]
    model = case.build()
    groups = case.groups(model) if case.groups else model.parameters()
    optimizer = torch.optim.AdamW(groups, **config["optimizer"])
    ddp_model, losses = torch.nn.parallel.DistributedDataParallel(model), []
    accumulation_steps = config["gradient_accumulation_steps"]
    for number, batch in enumerate(case.batches(job["batches"])[rank::count], 1):
        with nullcontext() if number % accumulation_steps == 0 else ddp_model.no_sync():
            loss = batch.call(ddp_model)
            (loss / accumulation_steps).backward()
        losses.append(loss.item())
        if number % accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.save({"losses": losses, "masters": weights}, f"{job['out']}-{rank}")
    dist.destroy_process_group()


def main(job: dict[str, Any]) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job.get("store"):  # else the engine makes the process group, from the environment
        dist.init_process_group(
            "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=count
        )
    case = CASES[job["case"]]
    model = case.build()
    engine, *_ = infinity.initialize(
        model, job["config"], model_parameters=case.groups(model) if case.groups else None
    )
    losses, norms = [], []
    batches = case.batches(job["batches"])[rank::count]
    for number, batch in enumerate(batches):
        if (rank, number) == tuple(job.get("killed", ())):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = batch.call(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    masters = {n: v.clone() for n, v in engine.state_dict(master=True).items()}
    engine.close()
    results = {"losses": losses, "norms": norms, "masters": masters}
    torch.save(results | {"stage": engine.plan.zero_stage}, f"{job['out']}-{rank}")


def find_missing_ranks() -> None:
    """Search for other ranks, of which none is started."""
    infinity.distributed.launch._WARN_AFTER_S = 0.0
    infinity.distributed.launch.find_ranks()


def machines(job: dict[str, Any]) -> None:
    """Three ranks without LOCAL_RANK and LOCAL_WORLD_SIZE, the last one on another host name."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.pop("GLOO_SOCKET_IFNAME")
    rank, name = int(os.environ["RANK"]), socket.gethostname()
    socket.gethostname = lambda: f"{name}-{rank // 2}"
    gloo_over_loopback = []

    def record_one_machine(one_machine: bool) -> Any:
        gloo_over_loopback.append(one_machine)
        return original(True)  # in fact all are on one machine

    original = infinity.distributed.environment.gloo_over_loopback
    for module in (infinity.distributed.launch, infinity.distributed.torch_context):
        module.gloo_over_loopback = record_one_machine
    with closing(infinity.distributed.launch.find_ranks()) as ranks:
        found = (ranks.local_rank, ranks.local_count, ranks.num_nodes, *gloo_over_loopback)
        ranks.synchronize("has found the others")  # closing would cut off ranks that still connect
    torch.save(found, f"{job['out']}-{rank}")


def layers(width: int, count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def memory(job: dict[str, Any]) -> None:
    """Save the planned RAM of a model built under `infinity.Init`, and the growth of the peak.

    The peak is measured over initialization and one training step. Both are in bytes.
    """
    process_memory.count_held()
    rank = int(os.environ.get("RANK", "0"))
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
    config = {
        "nvme_path": job["nvme"],
        "placement": placement | {"reshard_after_forward": True, "shared": False},
    }
    config["budget"] = {}

    def run(width: int, num_layers: int) -> dict[str, int]:
        with infinity.Init():
            model = layers(width, num_layers)
        peak = process_memory.Peak()
        with init_alone.start(model, config) as engine:
            engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).sum())
            engine.step()
            grown, memory = peak.grown, engine.plan.memory
        planned = sum(memory["device"].values()) + sum(memory["host"].values())
        return {"planned": planned - memory["host"]["process"], "grown": grown}

    run(256, 4)  # warm-up: allocations made once per process
    torch.save(run(WIDTH, NUM_LAYERS), f"{job['out']}-{rank}")


def train_with_shared_weights(job: dict[str, Any]) -> None:
    """Train one step with weights shared in RAM, and save two numbers of bytes.

    `others`: shards of other ranks; `less`: resident memory that the kernel counts for this process
    and the engine does not.
    """
    rank, placement = (
        os.environ["RANK"],
        dict.fromkeys(("weights", "optimizer_state", "gradients"), "host"),
    )
    config: dict[str, Any] = {"nvme_path": job["nvme"], "precision": "fp32", "budget": {}}
    config["placement"] = placement | {"reshard_after_forward": True, "shared": True}
    with init_alone.start(layers(WIDTH, NUM_LAYERS), config) as engine:
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        watch = components(engine).hooks.watch
        less = psutil.Process().memory_info().rss - watch._resident()
        torch.save({"others": engine.plan.shared_bytes, "less": less}, f"{job['out']}-{rank}")


def out_of_memory(job: dict[str, Any]) -> None:
    """Limit the second rank's address space, from the start or from the second step."""
    rank, extra_bytes = int(os.environ["RANK"]), 64 << 20
    dist.init_process_group("gloo")
    model = layers(1024, 24)

    def limit() -> None:
        if rank == 1:
            limit_bytes = psutil.Process().memory_info().vms + extra_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    if job["when"] == "start":
        limit()
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
    config = {"nvme_path": job["nvme"], "placement": placement | {"shared": False}, "budget": {}}
    with init_alone.start(model, config) as engine:
        for number in range(2):
            if number == 1:
                limit()
            samples = torch.ones(
                extra_bytes // 1024 if number == 1 else 1, 1024, dtype=torch.bfloat16
            )
            engine.backward(engine(samples).sum())
            engine.step()


def start_with_wrong_world_size(job: dict[str, Any]) -> None:
    """Start one rank with a WORLD_SIZE larger than that of the others."""
    infinity.distributed.launch._STALE_ENTRY_S = 0.5
    if int(os.environ["RANK"]) == job["rank"]:
        os.environ["WORLD_SIZE"] = "3"
    init_alone.start(layers(64, 2), {"nvme_path": job["nvme"]}).close()


def two_engines(job: dict[str, Any]) -> None:
    """Close the engine that made the process group, then train with a second one."""
    rank = os.environ["RANK"]

    def start() -> Any:
        torch.manual_seed(0)
        config = {"nvme_path": job["nvme"], "precision": "fp32", "budget": {}}
        return init_alone.start(layers(64, 2), config)

    first, second = start(), start()
    first.close()
    second.backward(second(torch.ones(1, 64)).sum())
    second.step()
    state = {name: value.clone() for name, value in second.state_dict().items()}
    second.close()
    results = {"state": state, "left": dist.is_initialized()}
    torch.save(results, f"{job['out']}-{rank}")


def save_on_one_rank(job: dict[str, Any]) -> None:
    """Save on rank 0 only; record its warning, and its error once rank 1 has closed."""
    rank, store = int(os.environ["RANK"]), dist.FileStore(job["store"])
    config = {"nvme_path": job["nvme"], "precision": "fp32", "budget": {}}
    engine = init_alone.start(layers(64, 2), config)
    # Set after the start, which is slow.
    infinity.distributed.torch_context._WARN_AFTER = timedelta(seconds=0.2)
    messages: list[str] = []

    def record_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        messages.append(str(message))
        store.set("said", "")

    if rank:
        store.wait(["said"])
        engine.close()
    else:
        warnings.showwarning = record_warning
        try:
            engine.save_checkpoint(job["saves"])
        except InfinityError as error:
            messages.append(str(error))
        engine.close()
    torch.save(messages, f"{job['out']}-{rank}")
