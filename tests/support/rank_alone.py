"""One rank in a process of its own, as torchrun starts it: `python -m support.rank_alone JOB`.

JOB is a file of JSON: what to do, and where the result goes. The group meets through a file, so
that no port is chosen; RANK and WORLD_SIZE are in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch


def main(job: dict[str, Any]) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if job.get("store"):  # else the engine makes the group, from the environment
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=count
        )
    from support.models import CASES

    import infinity

    case = CASES[job["case"]]
    config = {**job["config"], "nvme_path": job["folder"]}
    model = case.build()
    engine, *_ = infinity.initialize(
        model, config, model_parameters=case.groups(model) if case.groups else None
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


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
