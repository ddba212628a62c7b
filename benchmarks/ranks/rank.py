"""One rank of a contender of `bench_ranks.py`; requests and turns are those of `step/contender.py`.

Every contender has the same values, AdamW, clipping at 1, and its rank's own batches; all compute
in fp32, and meet by gloo, or by NCCL where each has a GPU.
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
from infinity.storage.devices import find_device

STAGES = (0, 1, 2, 3)


class Ours(Infinity):
    """One rank of our engine."""

    def plans(self) -> dict[str, Any]:
        """The first rank's: but for the rank, they are one."""
        return super().plans() if self.job["rank"] == 0 else {}

    def links(self) -> dict[str, float]:
        """Rates between the ranks, measured by all of them now, through what a run sends by."""
        with closing(find_device(self.device)) as device:
            return measure_links(self.engine.ranks, device)


class Together(Contender):
    """A torch loop around a model that some library shares out."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job | {"by_engine": False})
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.model = self.shared(self.build(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER_PARAMETERS)

    def shared(self, model: nn.Module) -> nn.Module:
        """The model as the library has it."""
        raise NotImplementedError

    def accumulating(self, *, last: bool) -> Any:
        """A context in which gradients stay on their rank, but for those of the last."""
        raise NotImplementedError

    def step(self) -> None:
        """Do one whole training step."""
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
        """Leave the group."""
        torch.distributed.destroy_process_group()


class Ddp(Together):
    """Everything whole on every rank."""

    def shared(self, model: nn.Module) -> nn.Module:
        """Gradients in buckets."""
        return nn.parallel.DistributedDataParallel(model)

    def accumulating(self, *, last: bool) -> Any:
        """See `Together`."""
        return nullcontext() if last else self.model.no_sync()

    def phases(self) -> dict[str, float]:
        """Forward and backward of one micro-batch without a byte between ranks, all computing."""
        with self.model.no_sync():
            for _ in range(2):  # the first brings gradients into being
                forward_s, backward_s = self._backward(self.batch()[0])
        self.optimizer.zero_grad()
        return {"forward_s": forward_s, "backward_s": backward_s, "update_s": 0.0}


class Fsdp(Together):
    """FSDP2: every block, and the rest, sharded."""

    def shared(self, model: nn.Module) -> nn.Module:
        """Blocks one by one; with the offload of its name, or none."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy

        more: dict[str, Any] = {"mesh": init_device_mesh(self.device.type, (self.job["ranks"],))}
        if self.job["contender"] == "fsdp_offload":
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return sharded(model, **more)

    def accumulating(self, *, last: bool) -> Any:
        """See `Together`."""
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class DeepSpeed(Peer):
    """The peer's ZeRO, all in RAM, by the stage in its name."""

    def config(self, model: nn.Module) -> dict[str, Any]:
        """What it is told."""
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
