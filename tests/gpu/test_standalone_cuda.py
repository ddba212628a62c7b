"""Tests on a real GPU that FusedAdam equals CPUAdam bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import infinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SHAPES = ((300, 17), (5,), (), (2, 3, 4), (1000, 129))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_adam_equals_cpu_adam(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    host = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    device = [nn.Parameter(p.detach().cuda()) for p in host]
    options = {"lr": 1e-2}
    cpu_adam, fused_adam = infinity.CPUAdam(host, **options), infinity.FusedAdam(device, **options)
    for _ in range(5):
        for p, q in zip(host, device, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.cuda()
        cpu_adam.step()
        fused_adam.step()
    for p, q in zip(host, device, strict=True):
        assert torch.equal(p.detach(), q.detach().cpu())
        for name, value in cpu_adam.state[p].items():
            assert torch.equal(value, fused_adam.state[q][name].cpu()), name
    state = copy.deepcopy(fused_adam.state_dict())
    reloaded = infinity.CPUAdam(host, **options)
    reloaded.load_state_dict(state)  # state is moved to the device of the parameters
    assert all(value.is_cpu for value in reloaded.state[host[0]].values())


def test_fused_adam_with_parameters_on_both_devices() -> None:
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, device="cuda"))]
    optimizer = infinity.FusedAdam(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(parameters[0].detach(), parameters[1].detach().cpu())
    with pytest.raises(infinity.InfinityError, match="FusedAdam for CUDA"):
        infinity.CPUAdam(parameters)
