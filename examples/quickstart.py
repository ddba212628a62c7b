"""Train a model that may be larger than GPU memory and RAM: `python examples/quickstart.py`.

Meant for one GPU of any size and a fast drive; runs on any CPU in seconds. Make it larger:
`width, depth = 8192, 480` is 32 billion parameters, 390 GB of state, on disk.
"""

import tempfile

import torch
from torch import nn

import infinity

width, depth = 256, 8
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
with infinity.Init():  # no memory is taken until the engine takes over
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*blocks, nn.Linear(width, 10))

config = {
    "nvme_path": tempfile.mkdtemp(),  # a directory on your fastest drive
    "placement": {"weights": "disk", "optimizer_state": "disk"},  # without it the plan decides
    "precision": "bf16" if device == "cuda" else "fp32",
    "cast_inputs": True,  # x is fp32
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "lr": 1e-3},
}
engine, *_ = infinity.initialize(model, config)
print(engine.plan.describe())

x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
y = x[:, :10].argmax(dim=1)
for step in range(20):
    loss = nn.functional.cross_entropy(engine(x.to(device)).float(), y.to(device))
    engine.backward(loss)
    engine.step()
    print(f"step {step + 1:2d}  loss {loss.item():.4f}")
engine.close()
