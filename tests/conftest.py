"""What every test runs under: one torch thread, since xdist runs as many tests as there are cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
