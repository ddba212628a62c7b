"""Train on one or several GPUs with bitwise equal losses and norms.

    python examples/two_gpus.py
    torchrun --standalone --nproc-per-node 2 examples/two_gpus.py

Meant for GPUs, one per process; without GPUs the processes use the CPU. A step has four batches:
one rank runs four micro-batches, two ranks run two each, assigned in turn.
"""

import os

import torch
from torch import nn

import infinity

BATCHES, STEPS, WIDTH = 4, 10, 256
count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
gpu = torch.cuda.is_available()
device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
torch.set_num_threads(1)  # on a CPU the number of threads changes the rounding

torch.manual_seed(0)  # on every rank: they train one model
with infinity.Init():
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))

config = {
    "precision": "bf16" if gpu else "fp32",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "lr": 1e-3},
    "gradient_accumulation_steps": BATCHES // count,  # micro-batches of each rank
}
engine, *_ = infinity.initialize(model, config, device=device)
if rank == 0:
    print(engine.plan.describe())

data = torch.randn(BATCHES, 64, WIDTH, generator=torch.Generator().manual_seed(0))
for step in range(STEPS):
    losses = []
    for x in data[rank::count].to(device):  # this rank's share, as of a DistributedSampler
        loss = nn.functional.cross_entropy(engine(x).float(), x[:, :10].argmax(dim=1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    every = engine.ranks.all_gather_object(losses)  # of all ranks
    if rank == 0:
        in_turn = [f"{loss:.9f}" for together in zip(*every, strict=True) for loss in together]
        print(f"step {step + 1:2d}  norm {engine.grad_norm:.12f}  losses {' '.join(in_turn)}")
engine.close()
