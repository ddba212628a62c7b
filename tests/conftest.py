"""What every test runs under: one torch thread, since xdist fills the cores with tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
