"""One rank of a script written for DeepSpeed.

`job` has the path of the configuration (`config`), the number of samples (`samples`) and the output
path (`out`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from support.models import CASES

from infinity.integrations import deepspeed


def main(job: dict[str, Any]) -> None:
    comm = deepspeed.comm
    deepspeed.init_distributed()
    case = CASES["gpt"]
    tokens = torch.cat([batch.args[0] for batch in case.batches(job["samples"] // 2)])
    data = torch.utils.data.TensorDataset(tokens)
    args = argparse.Namespace(deepspeed=True, deepspeed_config=job["config"], local_rank=-1)
    model = case.build()
    rank, count = comm.get_rank(), comm.get_world_size()
    # Only rank 0 has the values, as when transformers loads a model; all ranks must receive them.
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        for parameter in model.parameters() if rank else ():
            parameter.zero_()
    gathered, local = torch.empty(count), torch.tensor([float(rank)])
    comm.all_gather_into_tensor(output_tensor=gathered, tensor=local, log_name="ranks")
    assert gathered.tolist() == list(range(count))
    comm.reduce_scatter_tensor(output_tensor=local, tensor=gathered, op=comm.ReduceOp.SUM)
    assert local.item() == rank * count
    comm.broadcast(gathered, 0, group=comm.get_world_group(), prof=True)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    assert (engine.global_rank, engine.world_size) == (comm.get_rank(), comm.get_world_size())
    assert engine.local_rank == comm.get_local_rank()
    losses = []
    for batch in loader:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    mean = torch.tensor([sum(losses) / len(losses)], dtype=torch.float64)
    comm.all_reduce(mean, op=comm.ReduceOp.SUM)
    comm.barrier()
    engine.save_checkpoint(job["out"], "end")
    engine.save_16bit_model(job["out"], "model.bin")
    results = {"losses": losses, "mean": mean.item() / comm.get_world_size()}
    results |= {"masters": {n: v.clone() for n, v in engine.state_dict(master=True).items()}}
    results |= {"sizes": engine.get_batch_info(), "samples": engine.global_samples}
    engine.close()
    assert comm.is_initialized()  # the script made the group, so closing the engine keeps it
    torch.save(results, f"{job['out']}-{comm.get_rank()}")
    comm.destroy_process_group()
