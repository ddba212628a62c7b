"""One rank of a contender of `bench_ranks.py`, with the protocol of `step/contender.py`.

All contenders have the same initial values, AdamW, clipping at 1 and different batches per rank.
They compute in fp32 and communicate by gloo, or by NCCL on GPUs.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import closing, nullcontext
from typing import Any

import torch
from step.config import HYPER_PARAMETERS
from step.contender import Contender, Infinity, sharded
from step.contender import DeepSpeed as Peer
from step.contender import main as serve
from torch import Tensor, nn

from infinity.profiling.link_rates import measure_links
from infinity.storage.devices import resolve_device

STAGES = (0, 1, 2, 3)


class Ours(Infinity):
    """One rank of the infinity engine."""

    def plans(self) -> dict[str, Any]:
        """Return the plan on the first rank only; it is the same on all ranks."""
        return super().plans() if self.job["rank"] == 0 else {}

    def links(self) -> dict[str, float]:
        """Measure the rates of collectives between the ranks, with the device of a run."""
        with closing(resolve_device(self.device)) as device:
            return measure_links(self.engine.ranks, device)


class Together(Contender):
    """A torch training loop around a model that a library distributes."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job | {"by_engine": False})
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.model = self.distributed(self.build(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER_PARAMETERS)

    def distributed(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped by the library."""
        raise NotImplementedError

    def accumulating(self, *, last: bool) -> Any:
        """Return a context without gradient synchronization, unless `last`."""
        raise NotImplementedError

    def step(self) -> None:
        batch = self.batch()
        for index, micro_batch in enumerate(batch):
            with self.accumulating(last=index + 1 == len(batch)):
                self._backward(micro_batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, micro_batch: tuple[Tensor, Tensor]) -> list[float]:
        times = [time.perf_counter()]
        loss = self.model(*micro_batch)
        self.last_loss = loss.item()
        times.append(time.perf_counter())
        (loss / self.job["micro_batches"]).backward()
        self.synchronize()
        times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Ddp(Together):
    """DDP: full weights and state on every rank."""

    def distributed(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    def accumulating(self, *, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()

    def phases(self) -> dict[str, float]:
        """Time a micro-batch without communication while all ranks compute."""
        with self.model.no_sync():
            for _ in range(2):  # the first allocates gradients
                forward_s, backward_s = self._backward(self.batch()[0])
        self.optimizer.zero_grad()
        return {"forward_s": forward_s, "backward_s": backward_s, "update_s": 0.0}


class Fsdp(Together):
    """FSDP2: each block sharded, then the remaining parameters."""

    def distributed(self, model: nn.Module) -> nn.Module:
        """Shard each block; with CPU offload if the contender is `fsdp_offload`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy

        options: dict[str, Any] = {"mesh": init_device_mesh(self.device.type, (self.job["ranks"],))}
        if self.job["contender"] == "fsdp_offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return sharded(model, **options)

    def accumulating(self, *, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class DeepSpeed(Peer):
    """DeepSpeed's ZeRO in RAM; the stage is the last digit of the contender's name."""

    def config(self, model: nn.Module) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.job["rows"],
            "gradient_accumulation_steps": self.job["micro_batches"],
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {**HYPER_PARAMETERS, "torch_adam": True}},
            "zero_optimization": {"stage": int(self.job["contender"][-1]), "overlap_comm": False},
        }


CONTENDERS: dict[str, type[Contender]] = {
    "infinity_ram": Ours,
    "infinity_disk": Ours,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "fsdp_offload": Fsdp,
    **{f"deepspeed_{stage}": DeepSpeed for stage in STAGES},
}

if __name__ == "__main__":
    sys.exit(serve(CONTENDERS))
