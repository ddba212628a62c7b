"""One rank in a process of its own, as torchrun starts it: RANK and so on are in the environment.

`job` says what to do, and where the result goes, if the group meets through a file, and who dies.
"""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from support.models import CASES

import infinity


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
    torch.save({"losses": losses, "norms": norms, "masters": masters}, f"{job['out']}-{rank}")
