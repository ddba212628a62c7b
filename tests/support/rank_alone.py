"""One rank in a process of its own, as torchrun starts it: RANK and so on are in the environment.

`job` says what to do, and where the result goes, if the group meets through a file, and who dies.
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
from support.inside import components
from support.models import CASES

import infinity
import infinity.distributed.context
from infinity.errors import InfinityError

WIDTH, NUM_LAYERS = 1024, 48  # of layers that are linear


def plain(job: dict[str, Any]) -> None:
    """The same training by torch alone: DDP, AdamW and its clipping, in fp32."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    case, config = CASES[job["case"]], job["config"]
    model = case.build()
    groups = case.groups(model) if case.groups else model.parameters()
    optimizer = torch.optim.AdamW(groups, **config["optimizer"])
    shared, losses = torch.nn.parallel.DistributedDataParallel(model), []
    together = config["gradient_accumulation_steps"]
    for number, batch in enumerate(case.batches(job["batches"])[rank::count], 1):
        with nullcontext() if number % together == 0 else shared.no_sync():
            loss = batch.call(shared)
            (loss / together).backward()
        losses.append(loss.item())
        if number % together == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.save({"losses": losses, "masters": weights}, f"{job['out']}-{rank}")
    dist.destroy_process_group()


def main(job: dict[str, Any]) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job.get("store"):  # else the engine makes the group, from the environment
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
    found = {"losses": losses, "norms": norms, "masters": masters}
    torch.save(found | {"stage": engine.plan.zero_stage}, f"{job['out']}-{rank}")


def waits_for_others() -> None:
    """Look for ranks that nobody starts."""
    infinity.distributed.launch._WARN_AFTER_S = 0.0
    infinity.distributed.launch.find_ranks()


def machines(job: dict[str, Any]) -> None:
    """Of three ranks that no launcher tells where they are, the last is on another machine."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.pop("GLOO_SOCKET_IFNAME")
    rank, name = int(os.environ["RANK"]), socket.gethostname()
    socket.gethostname = lambda: f"{name}-{rank // 2}"
    by_loopback = []

    def noted(one_machine: bool) -> Any:
        by_loopback.append(one_machine)
        return usual(True)  # they are on one

    usual = infinity.distributed.environment.by_loopback
    for module in (infinity.distributed.launch, infinity.distributed.torch_context):
        module.by_loopback = noted
    with closing(infinity.distributed.launch.find_ranks()) as ranks:
        found = (ranks.local_rank, ranks.local_count, ranks.num_nodes, *by_loopback)
        ranks.synchronize("has found the others")  # one that closes cuts off who still connects
    torch.save(found, f"{job['out']}-{rank}")


def layers(width: int, count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def memory(job: dict[str, Any]) -> None:
    """Save the bytes that the plan reserves in RAM for a model made by `infinity.Init`, and those
    by which the peak grew while it was initialised and trained for a step.
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

    run(256, 4)  # what every process pays once
    torch.save(run(WIDTH, NUM_LAYERS), f"{job['out']}-{rank}")


def shares_ram(job: dict[str, Any]) -> None:
    """Of a model whose weights ranks share in RAM, bytes after a step: of the others' shards, and
    how much less than the kernel the engine counts for this process.
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
    """The second rank may take little more than it has, from the start or from the second step."""
    rank, room = int(os.environ["RANK"]), 64 << 20
    dist.init_process_group("gloo")
    model = layers(1024, 24)

    def limit() -> None:
        if rank == 1:
            most = psutil.Process().memory_info().vms + room
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    if job["when"] == "start":
        limit()
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
    config = {"nvme_path": job["nvme"], "placement": placement | {"shared": False}, "budget": {}}
    with init_alone.start(model, config) as engine:
        for number in range(2):
            if number == 1:
                limit()
            samples = torch.ones(room // 1024 if number == 1 else 1, 1024, dtype=torch.bfloat16)
            engine.backward(engine(samples).sum())
            engine.step()


def counted_otherwise(job: dict[str, Any]) -> None:
    """One rank was told of more processes than the others."""
    infinity.distributed.launch._STALE_ENTRY_S = 0.5
    if int(os.environ["RANK"]) == job["rank"]:
        os.environ["WORLD_SIZE"] = "3"
    init_alone.start(layers(64, 2), {"nvme_path": job["nvme"]}).close()


def two_engines(job: dict[str, Any]) -> None:
    """The one that made the group is closed first; what the other computes then."""
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
    found = {"state": state, "left": dist.is_initialized()}
    torch.save(found, f"{job['out']}-{rank}")


def on_one_rank_only(job: dict[str, Any]) -> None:
    """The first rank saves alone: it says that it waits, and that the other has closed."""
    rank, store = int(os.environ["RANK"]), dist.FileStore(job["store"])
    config = {"nvme_path": job["nvme"], "precision": "fp32", "budget": {}}
    engine = init_alone.start(layers(64, 2), config)
    # Not before: starts are slow.
    infinity.distributed.torch_context._WARN_AFTER = timedelta(seconds=0.2)
    said: list[str] = []

    def hear(message: Warning | str, *_: Any, **__: Any) -> None:
        said.append(str(message))
        store.set("said", "")

    if rank:
        store.wait(["said"])
        engine.close()
    else:
        warnings.showwarning = hear
        try:
            engine.save_checkpoint(job["saves"])
        except InfinityError as error:
            said.append(str(error))
        engine.close()
    torch.save(said, f"{job['out']}-{rank}")
